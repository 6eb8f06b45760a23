"""What an operator does, in a real browser, on the real processes: a model from its first refusal to the last
replica that was started from what it said before.

The tests of this file go on from one another's rows, in this order.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

expect.set_options(timeout=20_000)

KEY_TEXT = re.compile(r"llmgw_[0-9A-Za-z]{8}_[0-9A-Za-z]{38}")


def test_a_source_is_refused_and_put_right(stage: Stage, page: Page) -> None:
    stage.hub.held = "model.safetensors"
    stage.hub.gate.clear()
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="Add model").click()
    page.locator("#id_name").fill("parrot")
    page.locator("#id_source").fill("org/typo")
    page.locator("#id_scaling_min").fill("1")
    page.locator("#id_scaling_max").fill("1")
    page.locator("#id_profiles-0-name").fill("default")
    page.locator("#id_profiles-0-engine").select_option("vllm")
    page.locator("#id_profiles-0-gpu_class").fill("sim")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".errorlist")).to_contain_text("org/typo")
    page.locator("#id_source").fill("org/m")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".messagelist .success")).to_contain_text("parrot")


def test_it_loads_while_somebody_waits_and_then_answers(stage: Stage, page: Page) -> None:
    """Its weights come by half, until the page has told so."""
    page.goto("/admin/playground/?model=parrot")
    expect(page.get_by_label("Model", exact=True)).to_have_value("parrot")
    page.get_by_label("Your message").fill("Hello? <b>It is me</b>")
    page.get_by_label("Max tokens").fill("12")
    page.keyboard.press("Tab")
    page.get_by_label("Your message").press("Control+Enter")
    expect(page.get_by_role("status").first).to_contain_text(
        re.compile(r"The model is loading: fetching, 5\d %")
    )
    expect(page.get_by_role("progressbar")).to_have_attribute("value", re.compile(r"5\d"))
    stage.hub.gate.set()
    answer = page.locator("#log article.assistant")
    expect(answer.locator(".figures").first).to_contain_text("12 answered")
    expect(page.locator("#log article.user .words")).to_have_text("Hello? <b>It is me</b>")
    expect(page.locator("#standing .badge")).to_have_text("ready")
    page.get_by_label("Your message").fill("And now?")
    page.get_by_role("button", name="Send").click()
    told = answer.nth(1).locator(".figures")
    expect(told.first).to_contain_text(
        re.compile(r"TTFT \d+ ms · [\d.]+ tokens/s · \d+ tokens asked, 12 answered")
    )
    expect(told.last).to_contain_text("of parrot/default on gpu-01: the only one that is ready")
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert not KEY_TEXT.search(page.content() + kept)
