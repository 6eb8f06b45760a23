"""Several sim engines as one replica: none serves before all have come, none is left when one has gone."""

from __future__ import annotations

import contextlib
import signal
import socket

import pytest

from nodes.engines.causes import classify
from tests.services import free_port
from tests.sim_process import Sim, starting_sim
from tests.waiting import wait_until


def rank(number: int, meeting: int, *options: str, size: int = 3) -> contextlib.AbstractContextManager[Sim]:
    place = ("--master-addr", "127.0.0.1", "--master-port", str(meeting))
    return starting_sim("--nnodes", str(size), "--node-rank", str(number), *place, *options)


def gang(stack: contextlib.ExitStack) -> list[Sim]:
    """Three ranks that have met, of which the first serves."""
    meeting = free_port()
    ranks = [stack.enter_context(rank(number, meeting)) for number in (2, 0, 1)]
    ranks[1].wait_until_up()
    return [ranks[1], ranks[2], ranks[0]]


def test_rank_0_serves_once_all_have_come_and_the_others_have_no_door() -> None:
    meeting = free_port()
    with rank(0, meeting) as first, rank(1, meeting) as second:
        wait_until(lambda: "waits for the others" in second.words, "rank 1 to wait", timeout_s=20)
        wait_until(lambda: "waits for the others" in first.words, "rank 0 to wait", timeout_s=20)
        assert not first.is_up
        with rank(2, meeting) as third:
            first.wait_until_up()
            assert first.complete().status == 200
            wait_until(lambda: "rank 0 serves" in second.words, "rank 1 to have loaded")
            wait_until(lambda: "rank 0 serves" in third.words, "rank 2 to have loaded")
            assert not second.is_up
            assert not third.is_up


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_that_is_killed_takes_the_others_along(lost: int) -> None:
    with contextlib.ExitStack() as stack:
        ranks = gang(stack)
        ranks[lost].process.kill()
        for number, each in enumerate(ranks):
            code = each.process.wait(10)
            if number != lost:
                assert code == 1
                assert classify("sim", each.words, code).cause == "nccl"


def test_one_that_is_stopped_takes_the_others_along() -> None:
    with contextlib.ExitStack() as stack:
        ranks = gang(stack)
        ranks[2].process.send_signal(signal.SIGTERM)
        assert [each.process.wait(10) for each in ranks] == [1, 1, 0]


def test_one_that_cannot_load_takes_the_others_along() -> None:
    meeting = free_port()
    with rank(0, meeting, size=2) as first, rank(1, meeting, "--fail-load", "no luck", size=2) as second:
        assert second.process.wait(20) == 1
        assert first.process.wait(20) == 1
        assert not first.is_up


@pytest.mark.parametrize("number", [0, 1])
def test_one_that_waits_in_vain_ends_and_says_so(number: int) -> None:
    with rank(number, free_port(), "--rendezvous-timeout", "300ms") as alone:
        code = alone.process.wait(20)
        assert code == 1
        assert classify("sim", alone.words, code).cause == "dist_timeout"


def test_one_that_waits_can_be_stopped() -> None:
    with rank(0, free_port()) as alone:
        wait_until(lambda: "waits for the others" in alone.words, "it to wait", timeout_s=20)
        alone.process.terminate()
        assert alone.process.wait(10) == 0


def test_strangers_and_doubles_are_not_let_in() -> None:
    meeting = free_port()
    with rank(0, meeting) as first, rank(1, meeting):
        wait_until(lambda: can_connect(meeting), "rank 0 to let others in", timeout_s=20)
        for hello in (b"rank 2 of 3 0123abcd\n", b"\xff" * 1000 + b"\n", b"\n"):
            with socket.create_connection(("127.0.0.1", meeting), 10) as stranger:
                stranger.sendall(hello)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""
        with rank(1, meeting) as double:
            wait_until(lambda: "waits for the others" in double.words, "the double to wait", timeout_s=20)
            assert not first.is_up
            with rank(2, meeting):
                first.wait_until_up()
                assert double.process.poll() is None, "it goes on knocking"


def test_a_meeting_place_that_is_taken_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, rank(0, taken.getsockname()[1]) as first:
        code = first.process.wait(20)
        assert classify("sim", first.words, code).cause == "port_in_use"


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
