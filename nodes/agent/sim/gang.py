"""Several sim engines as the ranks of one replica, which meet at rank 0.

Their connections last as long as they do: one that ends takes the whole gang along, as a collective does in
real engines that lost a rank, and in their words. Only who holds the replica's key is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from dataclasses import dataclass

from nodes.agent.sim.ends import End, Ends
from nodes.agent.sim.recordings import SPEAKS_AS_VLLM

RETRY_S = 0.1
HELLO_S = 5.0
LINE_LIMIT_BYTES = 256
WHOLE = b"whole\n"

LOST = (
    f"{SPEAKS_AS_VLLM}\ntorch.distributed.DistBackendError: NCCL error: remote process exited or there was \
a network error"
)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place. `address` and `port` are where rank 0 lets the others in."""

    rank: int
    size: int
    address: str
    port: int
    timeout_s: float


class Gang:
    """One rank's side of it."""

    def __init__(self, place: Place, key: str) -> None:
        self.place, self._key = place, key.encode()
        self._server: asyncio.Server | None = None
        self._others: dict[int, asyncio.StreamWriter] = {}  # of rank 0: who has come; of the others: rank 0
        self._talks: set[asyncio.Task[None]] = set()
        self._is_whole = asyncio.Event()

    async def gather(self, ends: Ends) -> None:
        """Returns when all ranks are there, or when the process is to end."""
        meeting = asyncio.create_task(self._receive(ends) if self.place.rank == 0 else self._call(ends))
        ending = asyncio.create_task(ends.wait())
        both: list[asyncio.Task[None] | asyncio.Task[End]] = [meeting, ending]
        done, _ = await asyncio.wait(both, timeout=self.place.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        if not done:
            ends.come(End(1, self._too_late()))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._others.values():
            writer.close()
        if self._talks:
            await asyncio.wait(self._talks, timeout=1)

    async def _receive(self, ends: Ends) -> None:
        place = self.place

        async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            talk = asyncio.current_task()
            assert talk is not None
            self._talks.add(talk)
            try:
                await self._talk(reader, writer, ends)
            finally:
                self._talks.discard(talk)
                writer.close()

        try:
            self._server = await asyncio.start_server(
                let_in, place.address, place.port, limit=LINE_LIMIT_BYTES
            )
        except OSError as error:
            ends.come(End(1, f"sim: cannot listen on {place.address}:{place.port}: {error.strerror}"))
        await self._is_whole.wait()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: Ends) -> None:
        try:
            rank = self._rank_in(await asyncio.wait_for(reader.readline(), HELLO_S))
        except (TimeoutError, ValueError, OSError):
            return
        if rank is None or rank in self._others:
            return
        self._others[rank] = writer
        if len(self._others) == self.place.size - 1:
            for each in self._others.values():
                each.write(WHOLE)
            self._is_whole.set()
        await _until_it_ends(reader)
        del self._others[rank]
        if self._is_whole.is_set():
            ends.come(End(1, LOST))

    async def _call(self, ends: Ends) -> None:
        """Rank 0 may come later than the others."""
        place = self.place
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(place.address, place.port)
                self._others[0] = writer
                writer.write(self._hello(place.rank))
                if await reader.readline() == WHOLE:
                    break
                writer.close()
            await asyncio.sleep(RETRY_S)

        async def watch() -> None:
            await _until_it_ends(reader)
            ends.come(End(1, LOST))

        self._talks.add(asyncio.create_task(watch()))

    def _hello(self, rank: int) -> bytes:
        said = f"rank {rank} of {self.place.size}".encode()
        return said + b" " + hmac.new(self._key, said, "sha256").hexdigest().encode() + b"\n"

    def _rank_in(self, line: bytes) -> int | None:
        """Whose hello it is, if it is one of this gang's."""
        return next(
            (rank for rank in range(1, self.place.size) if hmac.compare_digest(line, self._hello(rank))), None
        )

    def _too_late(self) -> str:
        place = self.place
        if place.rank > 0:
            return (
                f"{SPEAKS_AS_VLLM}\ntorch.distributed.DistNetworkError: The client socket has timed out "
                f"after {place.timeout_s * 1000:.0f}ms while trying to connect to "
                f"({place.address}, {place.port})."
            )
        return (
            f"{SPEAKS_AS_VLLM}\ntorch.distributed.DistStoreError: Timed out after {place.timeout_s:g} "
            f"seconds waiting for clients. {len(self._others) + 1}/{place.size} clients joined."
        )


async def _until_it_ends(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(LINE_LIMIT_BYTES):
            pass
