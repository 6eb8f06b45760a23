"""What settings do to the gateway: each test starts one that is set up for it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from aiohttp import web

from nodes.models import Demand
from tests.stage import MESSAGES, begin_stream, chat_event, playing, text_of, well_behaved
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_keys_do_not_travel_in_the_clear(settings: Any) -> None:
    settings.LLMGW_PLAIN_HTTP = False
    with playing() as play:
        refusal = play.send("GET", "/v1/models")
        assert (refusal.status, refusal.body["code"]) == (403, "https_only")


def test_a_fault_of_the_gateways_own_is_told_in_the_shape_of_all_errors(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.LLMGW_MAX_BODY_BYTES = None  # no operator's doing
    with playing() as play:
        refusal = play.refused()
    assert (refusal.status, refusal.body["code"]) == (500, "gateway_fault")
    assert "TypeError" not in refusal.body["message"]
    assert "TypeError" in caplog.text


async def _without_end(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    while True:
        await response.write(chat_event(fields, "word " * 10_000))


def test_an_engine_is_left_when_its_client_reads_nothing(settings: Any) -> None:
    """What it was sent stays in bounded buffers until then, and the others are served."""
    settings.LLMGW_STALL_S = 0.5
    with playing() as play:
        play.engine.script = _without_end
        body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": True}).encode()
        with play.web.connection() as deaf:
            deaf.sendall(play.request(body))
            wait_until(lambda: play.engine.heard and play.engine.heard[0].is_gone, "the engine to be left")
            wait_until(lambda: Demand.objects.get().in_flight == 0, "nothing to be in flight")
            play.engine.script = well_behaved
            assert text_of(play.chunks()) == "Hello from here."
            deaf.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while data := deaf.recv(1 << 20):
                    assert b"[DONE]" not in data
        assert [heard.is_gone for heard in play.engine.heard] == [True, False]
