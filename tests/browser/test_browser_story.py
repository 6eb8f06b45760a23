"""What an operator does, in a real browser, on the real processes: a model from its first refusal to the last
replica that was started from what it said before.

The tests of this file go on from one another's rows, in this order.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import struct
import zlib
from base64 import b64encode
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
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
    """Its weights come by half, until the pages have told so. The first page follows by itself."""
    first = stage.open("/admin/")
    now = first.get_by_role("region", name="Now")
    expect(now).to_contain_text("1 loading")
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
    expect(now).to_contain_text("1 ready")
    first.close()
    page.get_by_label("Your message").fill("And now?")
    page.get_by_role("button", name="Send").click()
    told = answer.nth(1).locator(".figures")
    expect(told.first).to_contain_text(
        re.compile(r"TTFT \d+ ms · [\d.]+ tokens/s · \d+ tokens asked, 12 answered")
    )
    expect(told.last).to_contain_text("of parrot/default on gpu-01: the only one that is ready")
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert not KEY_TEXT.search(page.content() + kept)


def test_an_edit_is_foretold_and_leaves_what_runs_alone(stage: Stage, page: Page) -> None:
    (replica,) = stage.trial.replicas("parrot")
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="parrot").click()
    page.locator("#id_profiles-0-args").fill("--max-model-len=4096")
    page.get_by_role("button", name="What would this change?").click()
    foretold = page.get_by_role("status").filter(has_text="What this would change")
    expect(foretold).to_contain_text("--max-model-len=4096")
    expect(foretold).to_contain_text("stale")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".messagelist .success")).to_contain_text("parrot")
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="parrot").click()
    stale = page.get_by_role("row").filter(has_text=replica["id"][:8])
    expect(stale.locator(".badge", has_text="stale")).to_be_visible()
    expect(stale.locator(".badge", has_text="ready")).to_be_visible()
    stale.get_by_role("link").first.click()
    expect(page.locator(".facts .now", has_text="--max-model-len=4096").first).to_be_visible()
    assert [each["id"] for each in stage.trial.replicas("parrot")] == [replica["id"]]


def test_a_roll_replaces_what_is_stale(stage: Stage, page: Page) -> None:
    (old,) = stage.trial.replicas("parrot")
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="parrot").click()
    page.get_by_role("button", name="Roll", exact=True).click()
    page.get_by_label("Why, for the history:").fill("a shorter context")
    page.get_by_role("button", name=re.compile("^Yes")).click()
    expect(page.locator(".messagelist .success")).to_be_visible()
    page.goto("/admin/catalog/model/")
    page.get_by_role("link", name="parrot").click()
    expect(page.locator("#id_name")).to_have_value("parrot")
    row = page.get_by_role("row").filter(has_text=old["id"][:8])
    expect(row).to_have_count(0, timeout=60_000)  # the page follows, and nobody has to load it again
    expect(page.locator(".badge", has_text="stale")).to_have_count(0)
    expect(page.locator(".facts .badge", has_text="ready").first).to_be_visible()


# --- the playground ---------------------------------------------------------------------------------------


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# One red dot of 8 bits a colour.
PNG = b"\x89PNG\r\n\x1a\n" + b"".join(
    (
        _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)),
        _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")),
        _chunk(b"IEND", b""),
    )
)


@pytest.fixture
def playground(stage: Stage, page: Page) -> Page:
    """With a model that has every ability, and one that sleeps."""
    if not stage.trial.replicas("able"):
        profile = {"name": "default", "engine": "sim", "gpu_class": "sim", "args": ["--default-tokens", "6"]}
        able = {"tools": True, "vision": True}
        common = {"source": "sim/able", "profiles": [profile]}
        scaling = {"min": 1, "max": 1}
        stage.trial.api(
            "POST", "models", {"name": "able", "capabilities": able, "scaling": scaling, **common}
        )
        stage.trial.api("POST", "models", {"name": "asleep", "scaling": {"min": 0, "max": 0}, **common})
    page.goto("/admin/playground/?model=able")
    expect(page.locator("#standing .badge")).to_have_text("ready")
    return page


def sent_by(page: Page) -> Any:
    """The request of a chat that is sent now."""
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    return sent.value.post_data_json


def test_a_schema_and_an_image_go_along_and_the_snippets_say_the_same(
    stage: Stage, playground: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = playground
    page.get_by_label("System prompt").fill("Be 'brief'.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_text("JSON schema").click()
    page.get_by_role("button", name="Fill in a sample").locator("visible=true").click()
    page.get_by_label("Image", exact=True).set_input_files(
        {"name": "dot.png", "mimeType": "image/png", "buffer": PNG}
    )
    expect(page.get_by_role("img", name="dot.png")).to_be_visible()
    page.get_by_label("Your message").fill("What is it?")
    page.locator("summary", has_text="curl").click()
    page.locator("summary", has_text="Python").click()
    curl, program = shlex.split(page.locator("#curl").inner_text()), page.locator("#python").inner_text()
    asked = sent_by(page)
    assert asked["messages"][0] == {"role": "system", "content": "Be 'brief'."}
    text, image = asked["messages"][1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    dot = image["image_url"]["url"]
    assert dot == f"data:image/png;base64,{b64encode(PNG).decode()}"
    image["image_url"]["url"] = "data:image/png;base64,..."
    assert json.loads(curl[-1]) == asked
    assert "Authorization: Bearer $LLMGW_KEY" in curl
    expect(page.locator("#log .figures").first).to_be_visible()
    words = page.locator("#log article.assistant .words").inner_text()
    assert {*json.loads(words)} == {"title", "year", "tags"}

    monkeypatch.setenv("LLMGW_KEY", stage.trial.api_key)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program.replace("data:image/png;base64,...", dot), {})
    assert {*json.loads(printed.getvalue())} == {"title", "year", "tags"}


def test_a_tool_is_called_and_answered(playground: Page) -> None:
    page = playground
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Fill in a sample").locator("visible=true").click()
    page.get_by_label("Your message").fill("Call get_weather")
    page.get_by_role("button", name="Send").click()
    called = page.locator("#log article.assistant pre")
    expect(called).to_contain_text("get_weather({")
    page.get_by_label("What get_weather answers").fill('{"sky": "blue"}')
    asked, call, result = sent_by(page)["messages"]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (asked["role"], result["role"], result["content"]) == ("user", "tool", '{"sky": "blue"}')
    expect(page.locator("#log article.assistant").nth(1).locator(".figures").first).to_be_visible()


def test_what_goes_wrong_is_said_and_nothing_typed_is_lost(stage: Stage, playground: Page) -> None:
    page = playground
    message, send = page.get_by_label("Your message"), page.get_by_role("button", name="Send")
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools, a JSON list").fill("[")
    message.fill("Hello?")
    send.click()
    expect(page.locator("#tools-fault")).to_contain_text("This is no JSON list")
    expect(page.get_by_label("Tools, a JSON list")).to_be_focused()
    page.get_by_label("Tools, a JSON list").fill("")

    page.get_by_label("Model", exact=True).select_option("asleep")
    send.click()
    expect(page.get_by_role("alert")).to_contain_text('The model "asleep" is off')
    expect(page.get_by_role("link", name="Look at the model")).to_be_visible()
    expect(message).to_have_value("Hello?")

    page.get_by_label("Model", exact=True).select_option("able")
    page.get_by_label("Max tokens").fill("4000")
    send.click()
    expect(page.locator("#log .words").nth(1)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#log .figures").first).to_contain_text("stopped by you")

    keys = stage.trial.api("GET", "keys")["results"]
    (own,) = [key["id"] for key in keys if key["name"] == "playground of ada" and key["state"] == "live"]
    stage.trial.api("DELETE", f"keys/{own}")
    page.get_by_label("Max tokens").fill("3")
    message.fill("Once more?")
    send.click()
    expect(page.locator("#log .figures", has_text="3 answered")).to_be_visible()

    page.route("**/v1/**", lambda route: route.fulfill(status=404, content_type="text/html", body="<h1>no"))
    message.fill("Anybody?")
    send.click()
    expect(page.get_by_role("alert")).to_contain_text("is not llmgw's gateway")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("log")).to_have_text("Nothing has been said yet.")


# --- for everybody ------------------------------------------------------------------------------------------


Scheme = tuple[Literal["light", "dark"], dict[str, Any]]
"""Colours, and what of axe's rules is asked of them."""


def test_nobody_is_kept_out_by_how_a_page_is_made(stage: Stage, playground: Page) -> None:
    """axe finds no serious fault. In the dark colours alone can differ, and three pages have them all. The
    policy refuses styles that axe itself tries, so nobody listens to this page's complaints."""
    (replica,) = stage.trial.replicas("able")
    page, faults = stage.open(), []
    light: Scheme = ("light", {})
    dark: Scheme = ("dark", {"runOnly": ["color-contrast"]})
    for path, schemes in (
        ("/admin/", (light, dark)),
        ("/admin/catalog/model/", (light,)),
        ("/admin/catalog/model/1/change/", (light,)),
        ("/admin/nodes/replica/", (light,)),
        (f"/admin/nodes/replica/{replica['id']}/change/", (light, dark)),
        ("/admin/nodes/node/1/change/", (light,)),
        ("/admin/playground/?model=able", (light, dark)),
    ):
        page.goto(path)
        for scheme, options in schemes:
            page.emulate_media(color_scheme=scheme)
            page.evaluate("Promise.all(document.getAnimations().map((each) => each.finished))")
            found = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
            faults += [
                f"{path} ({scheme}): {each['help']}: {each['nodes'][0]['html']}"
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
    page.close()
    assert faults == []
