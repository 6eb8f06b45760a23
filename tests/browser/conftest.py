"""llmgw's real processes, and a Chromium to look at them with, started once for a file of tests.

The browser is the machine's own (`apt-get install chromium`); none is downloaded. Without one these tests are
skipped and say so, unless BROWSER_TESTS=required, which makes that a failure.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests import weights_hub
from tests.engine_stand_in import stand_in
from tests.trial import Trial
from tests.weights_hub import FileHub

MISSING = "no Chromium is installed, and so no page was looked at: `apt-get install chromium`, then once more"
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 2_000_000}


def program() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    found = program()
    if found is None and os.environ.get("BROWSER_TESTS") == "required":
        pytest.fail(MISSING)
    return found or pytest.skip(MISSING)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class Stage:
    """What runs, who is logged in, and what the browser complained of."""

    trial: Trial
    hub: FileHub
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str = "/admin/") -> Page:
        page = self.context.new_page()
        page.goto(path)
        return page

    def listen(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.complaints.append(f"{page.url}: {error}"))
        page.on("console", lambda said: self.hear(page, said.type, said.text))

    def hear(self, page: Page, kind: str, text: str) -> None:
        """An answer of 4xx or 5xx is one that a page may well have wanted to see."""
        if kind in ("error", "warning") and not re.search(r"responded with a status of [45]\d\d", text):
            self.complaints.append(f"{page.url}: {text}")


@pytest.fixture(scope="module")
def stage(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A node with three simulated GPUs and a stand-in for vllm; a hub that has org/m; ada, logged in."""
    folder = tmp_path_factory.mktemp("browser")
    with weights_hub.running(FILES) as hub:
        trial = Trial(folder, {"LLMGW_HUB_ENDPOINT": hub.url, "HF_ENDPOINT": hub.url, "LLMGW_GRACE_S": "0.2"})
        try:
            trial.start_worker()
            trial.start_web()
            engine = stand_in(folder, "vllm")
            trial.start_agent("gpu-01", "--sim-gpus", "3:sim", "--engine", f"vllm={engine}")
            yield Stage(trial, hub, logged_in(browser, trial, viewport={"width": 1280, "height": 900}))
            trial.stop()
        finally:
            trial.end()


def logged_in(browser: Browser, trial: Trial, **options: Any) -> BrowserContext:
    """As ada."""
    context = browser.new_context(base_url=trial.url, **options)
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.goto("/admin/")
    page.get_by_label("Username").fill("ada")
    page.get_by_label("Password").fill(trial.password)
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("Needs a person").wait_for()
    page.close()
    return context


@pytest.fixture
def page(stage: Stage) -> Iterator[Page]:
    """A page of ada's, which must have had nothing to complain of: no error of a script, no breach of the
    policy."""
    page = stage.context.new_page()
    stage.listen(page)
    yield page
    page.close()
    complaints, stage.complaints = stage.complaints, []
    assert complaints == []
