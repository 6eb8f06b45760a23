"""Pages that follow what happens, in a real browser: what differs is replaced, what people do there stays.

The server is this file: each test says what it answers with next. Time is the browser's own, and wound on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route

STATIC = Path(__file__).parents[2] / "nodes" / "static" / "nodes"
ORIGIN = "http://llmgw.test"


class Server:
    """What is at the address of the page and of the log; None: it is away."""

    def __init__(self) -> None:
        self.body: str | None = ""
        self.log: tuple[int, str] = (200, "")
        self.why = ""

    def answer(self, route: Route) -> None:
        path = route.request.url.removeprefix(ORIGIN).partition("?")[0]
        if path.endswith(".js"):
            text = (STATIC / path.removeprefix("/")).read_text()
            route.fulfill(body=text, content_type="text/javascript")
        elif path == "/log":
            route.fulfill(status=self.log[0], body=self.log[1])
        elif path == "/why":
            route.fulfill(body=f"<h1>Why</h1><div data-live='why' data-every='5'>{self.why}</div>")
        elif self.body is None:
            route.abort()
        else:
            scripts = "".join(f'<script type="module" src="/{name}.js"></script>' for name in ("live", "log"))
            html = f'<!doctype html>{scripts}<div id="content">{self.body}</div>'
            route.fulfill(body=html, content_type="text/html")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(10_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.clock.install()
    page.route("**/*", server.answer)
    yield page
    page.close()
    assert problems == []


def rows(*names: str, badge: str = "ready") -> str:
    lines = (
        f'<tr><td><input type="checkbox" class="action-select" value="{name}"></td>'
        f'<td><a href="/{name}">{name}</a> <span class="badge">{badge}</span></td></tr>'
        for name in names
    )
    return (
        f'<div data-live="rows" data-called="the list"><table><tbody>{"".join(lines)}</tbody></table></div>'
    )


def wind_on(page: Page) -> None:
    """Until the page has been looked at again."""
    with page.expect_event("requestfinished"):
        page.clock.run_for(2_100)


def test_a_row_that_is_ticked_is_the_same_row_whatever_comes_and_goes(page: Page, server: Server) -> None:
    server.body = rows("a", "b", "c")
    page.goto(ORIGIN)
    page.locator("[value=b]").check()
    page.locator("[value=b]").focus()
    server.body = rows("new", "c", "b", "d", badge="draining")
    wind_on(page)
    page.locator("[value=new]").wait_for()
    links = page.locator("tr a").all_inner_texts()
    assert links == ["new", "c", "b", "d"]
    assert [box.get_attribute("value") for box in page.locator(":checked").all()] == ["b"]
    assert page.evaluate("document.activeElement.value") == "b"
    assert page.locator("[role=status]").inner_text() == "Changed: the list."


def test_what_is_open_or_selected_or_kept_stays(page: Page, server: Server) -> None:
    part = (
        '<div data-live="one"><details><summary>more</summary>{0}</details><input id="typed">'
        '<p data-kept>{0}</p><p id="told">{0}</p></div><div data-live="two"><p id="marked">{0}</p></div>'
    )
    server.body = part.format("before")
    page.goto(ORIGIN)
    page.locator("summary").click()
    page.locator("#typed").fill("half a word")
    page.evaluate("getSelection().selectAllChildren(document.getElementById('marked'))")
    server.body = part.format("<b>after</b>")
    wind_on(page)
    page.locator("#told b").wait_for()
    assert page.locator("details").get_attribute("open") is not None
    assert page.locator("details b").inner_text() == "after"
    assert page.locator("#typed").input_value() == "half a word"
    assert page.locator("[data-kept]").inner_text() == "before"
    assert page.locator("#marked").inner_text() == "before"


def test_what_is_folded_away_is_asked_for_while_it_is_open(page: Page, server: Server) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(ORIGIN)))
    server.body = '<details data-from="/why"><summary>Why</summary><div>elsewhere</div></details>'
    server.why = "<p>no room</p><details id=all><summary>all</summary>gpu-01</details>"
    page.goto(ORIGIN)
    page.clock.run_for(10_000)
    assert "/why" not in asked
    page.get_by_text("Why").click()
    page.get_by_text("no room").wait_for()
    page.get_by_text("all").click()
    server.why = server.why.replace("no room", "1 has room")
    page.clock.run_for(5_100)
    page.get_by_text("1 has room").wait_for()
    assert page.get_by_text("gpu-01").is_visible(), "what was opened there stays open"
    page.get_by_text("Why").click()
    count = asked.count("/why")
    page.clock.run_for(10_000)
    assert asked.count("/why") == count


def test_ages_are_no_news_and_a_badge_is(page: Page, server: Server) -> None:
    part = '<div data-live="one" data-called="the node"><span class="badge">{}</span> for {} s</div>'
    server.body = part.format("fresh", 5)
    page.goto(ORIGIN)
    server.body = part.format("fresh", 7)
    wind_on(page)
    page.get_by_text("for 7 s").wait_for()
    assert page.locator("[role=status]").inner_text() == ""
    server.body = part.format("lost", 9)
    wind_on(page)
    page.get_by_text("lost").wait_for()
    assert page.locator("[role=status]").inner_text() == "Changed: the node."


def test_a_server_that_is_away_is_said_with_the_age_of_what_is_shown(page: Page, server: Server) -> None:
    server.body = rows("a")
    page.goto(ORIGIN)
    assert page.locator(".live-status").inner_text() == "Live"
    server.body = None
    page.clock.run_for(2_100)
    page.locator(".live-status.lost").wait_for()
    page.clock.run_for(4_000)
    assert page.locator(".live-status").inner_text() == "Last update 6 s ago; connection lost"
    server.body = rows("b")
    page.clock.run_for(10_000)
    page.locator("[value=b]").wait_for()
    assert page.locator(".live-status").inner_text() == "Live"


LOG = (
    '<section data-log="/log"><button data-pause hidden>Pause</button><span data-state></span>'
    '<a href="/log?attempt=3" data-attempt="attempt 3">show</a><pre></pre></section>'
)


def test_a_log_is_bounded_text_and_can_be_paused(page: Page, server: Server) -> None:
    server.body = LOG
    server.log = (200, "".join(f"<b>line</b> {number}\n" for number in range(3_000)))
    page.goto(ORIGIN)
    page.get_by_text("Nothing more is being written.").wait_for()
    lines = page.locator("pre").inner_text().strip().split("\n")
    assert (len(lines), lines[-1]) == (2_000, "<b>line</b> 2999")
    page.get_by_role("button", name="Pause").click()
    assert page.locator("[data-state]").inner_text() == "Paused."
    server.log = (503, '{"errors": [{"sentence": "The agent of gpu-01 does not answer."}]}')
    page.get_by_role("button", name="Go on").click()
    page.get_by_text("The agent of gpu-01 does not answer.").wait_for()


def test_the_log_of_an_ended_process_is_shown_in_its_place(page: Page, server: Server) -> None:
    server.body = LOG
    page.goto(ORIGIN)
    server.log = (200, "it ran out of memory\n")
    with page.expect_request("**/log?tail=200&follow=1&attempt=3"):
        page.get_by_text("show").click()
    page.get_by_text("it ran out of memory").wait_for()
