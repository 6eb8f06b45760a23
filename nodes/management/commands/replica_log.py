"""`manage.py replica_log`."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from contextlib import suppress
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.management.shell import refusals
from catalog.reading import shown
from nodes.conversation import AgentProblem
from nodes.logs import TAIL_LINES_LIMIT, follow_log, read_log, visible
from nodes.management.shell import find_replica
from nodes.models import Node

TAIL = 200


class Command(BaseCommand):
    help = "Show what a replica's engine wrote, asked of its node; manage.py replicas tells the ids."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", help="the replica's id, or its first digits")
        parser.add_argument("--tail", type=int, default=TAIL, metavar="LINES", help=f"{TAIL} unless told")
        parser.add_argument("--follow", action="store_true", help="and what it writes, until it is over")
        parser.add_argument("--attempt", type=int, help="of an earlier process, by its number")
        parser.add_argument("--rank", type=int, default=0, help="of another rank than the first")

    def handle(self, *args: Any, id: str, rank: int, **options: Any) -> None:
        with refusals():
            replica = find_replica(id)
            found = replica.ranks.filter(rank=rank).select_related("node").first()
        if found is None:
            raise CommandError(f"{shown(str(replica))} has no rank {rank}.")
        try:
            self._tell(found.node, str(replica.pk), **options)
        except AgentProblem as problem:
            raise CommandError(shown(str(problem), 2_000)) from None

    def _tell(
        self, node: Node, replica: str, *, tail: int, attempt: int | None, follow: bool, **options: Any
    ) -> None:
        if not 1 <= tail <= TAIL_LINES_LIMIT:
            raise CommandError(f"--tail {tail}: give a number of lines from 1 to {TAIL_LINES_LIMIT}.")
        if not follow:
            self.stdout.write(visible(read_log(node, replica, tail=tail, attempt=attempt)), ending="")
            return

        if not read_log(node, replica, tail=1, attempt=attempt):
            self.stderr.write("Nothing is written yet. What comes is shown here, until Ctrl-C or its end.")

        async def go_on() -> None:
            async for piece in follow_log(node, replica, tail=tail, attempt=attempt):
                self.stdout.write(visible(piece), ending="")
                self.stdout.flush()

        with suppress(KeyboardInterrupt):
            asyncio.run(go_on())
