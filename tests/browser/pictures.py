"""The README's pictures, taken anew from what runs: `make pictures`. The pages that people look at most are
taken light and dark.

The cluster is a trial's, with simulated engines; the day that its plots show is made up.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import MISSING, OPTIONS, logged_in, program
from tests.trial import ROOT, Trial
from tests.waiting import wait_until

FOLDER = ROOT / ".github"
LIMIT_BYTES = 150_000
VIEW = {"width": 1080, "height": 800}
NO_SIDEBAR = "localStorage.setItem('django.admin.navSidebarIsOpen', 'false')"

_A_DAY = """
from catalog.models import database_now
from tests.bench.page_times import remember
remember(database_now(), days=1)
"""


def main() -> None:
    chromium = program()
    if chromium is None:
        sys.exit(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="llmgw-pictures-"))
    trial = Trial(folder)
    try:
        _set_up(trial)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
            for scheme in ("light", "dark"):
                for name, page in _pages(browser, trial, scheme):
                    _take(page, FOLDER / f"{name}-{scheme}.png")
            for name, page in _steps(browser, trial):
                _take(page, FOLDER / f"{name}.png")
            browser.close()
        trial.stop()
    finally:
        trial.end()
        shutil.rmtree(folder)


def _take(page: Page, path: Path) -> None:
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size // 1000} kB")
    assert size <= LIMIT_BYTES, "too large for a README; show less of the page"


def _set_up(trial: Trial) -> None:
    """Models that run, load, wait for a GPU and have gone stale, on two nodes."""
    trial.start_web()
    for node in ("gpu-01", "gpu-02"):
        trial.start_agent(node, "--sim-gpus", "4:h100-80g")
    for name, low, most, profile in (
        ("gemma-3-27b", 2, 4, {}),
        ("qwen3-32b", 2, 2, {"tp": 2}),
        ("llama-3.3-70b", 1, 1, {"tp": 4}),
        ("bge-m3", 0, 1, {}),
    ):
        profiles = [{"name": "h100", "engine": "sim", "gpu_class": "h100-80g", **profile}]
        scaling = {"min": low, "max": most}
        model = {"name": name, "source": f"sim/{name}", "profiles": profiles, "scaling": scaling}
        trial.api("POST", "models", {**model, "description": "Answers that a simulated engine makes up."})
    trial.manage("shell", "--no-imports", "--command", _A_DAY)
    trial.start_worker()

    def are_ready() -> bool:
        return sum(each["state"] == "ready" for each in trial.replicas()) == 4

    wait_until(are_ready, "four replicas to be ready", tell=trial.story, timeout_s=120)
    (edited,) = trial.api("GET", "models/gemma-3-27b")["profiles"]
    edited["args"] = ["--max-num-seqs", "64"]
    trial.api("PATCH", "models/gemma-3-27b", {"profiles": [edited], "why": "more at once"})


def _pages(browser: Browser, trial: Trial, scheme: Any) -> Iterator[tuple[str, Page]]:
    context = logged_in(browser, trial, viewport=VIEW, color_scheme=scheme)
    context.add_init_script(NO_SIDEBAR)
    page = context.new_page()
    page.goto("/admin/")
    expect(page.locator("figure.plot canvas").first).to_be_visible()
    yield "overview", page
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="gemma-3-27b").click()
    expect(page.locator("figure.plot canvas").first).to_be_visible()
    yield "model", page
    page.goto("/admin/playground/?model=gemma-3-27b")
    expect(page.locator("#standing .badge")).to_have_text("ready")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("Your message").fill("Tell me what you can do.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#log .figures").last).to_contain_text(re.compile("on gpu-0"))
    yield "playground", page
    context.close()


def _steps(browser: Browser, trial: Trial) -> Iterator[tuple[str, Page]]:
    """An edit, and what comes of one."""
    context = logged_in(browser, trial, viewport=VIEW)
    context.add_init_script(NO_SIDEBAR)
    page = context.new_page()
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="qwen3-32b").click()
    page.locator("#id_scaling_max").fill("3")
    page.locator("#id_profiles-0-args").fill("--max-num-seqs=64")
    page.get_by_role("button", name="What would this change?").click()
    expect(page.locator(".foretold")).to_contain_text("Would be stale")
    yield "edit", page
    page.goto("/admin/nodes/replica/")
    expect(page.locator(".badge", has_text="stale profile").first).to_be_visible()
    yield "replicas", page
    context.close()


if __name__ == "__main__":
    main()
