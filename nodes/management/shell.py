"""How commands find the node, replica, job or webhook that an operator names, read what no argument may hold,
tell what a change would bring about, and stop what they carry out."""

from __future__ import annotations

import getpass
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management.base import CommandError, OutputWrapper

from catalog.management.shell import print_table
from catalog.reading import quote
from nodes import webhooks
from nodes.consequences import Consequences
from nodes.models import Job, Node, Orphan, Replica, Webhook
from nodes.telling import NO_CONSEQUENCES, consequences_tables

STOPPED_CODE = 130  # as shells tell of a program that Ctrl-C ended
SHORTEST_ID = 4  # digits that tell replicas apart well enough to be typed
_BEGINNING = re.compile(f"[0-9a-fA-F-]{{{SHORTEST_ID},36}}")


def find_node(name: str) -> Node:
    node = Node.objects.filter(name=name).first()
    if node is None:
        raise CommandError(f"There is no node {quote(name)}; manage.py nodes tells which there are.")
    return node


def find_webhook(text: str) -> Webhook:
    found = webhooks.find_webhook(text)
    if found is None:
        raise CommandError(
            f"There is no webhook {quote(text)}; manage.py webhook_list tells which there are."
        )
    return found


def read_url() -> str:
    """Of a webhook, from whoever is at the terminal, or from standard input: its path may be a secret, and
    everybody on a machine sees arguments."""
    return (getpass.getpass("URL: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()


def find_replica(text: str) -> Replica:
    """By its id or the beginning of it, as tables show it."""
    if not _BEGINNING.fullmatch(text):
        raise CommandError(
            f"{quote(text)} is no replica's id: give its first digits, {SHORTEST_ID} or more, "
            "as manage.py replicas shows them."
        )
    found = list(Replica.objects.filter(id__startswith=text.lower())[:3])
    alive = [replica for replica in found if replica.state not in Replica.OVER]
    chosen = alive if len(alive) == 1 else found
    if not chosen:
        raise CommandError(
            f"There is no replica {quote(text)}; manage.py replicas --all tells which there are."
        )
    if len(chosen) > 1:
        told = ", ".join(str(replica.pk) for replica in chosen)
        raise CommandError(f"{quote(text)} begins the ids of several replicas ({told}); give more of it.")
    return chosen[0]


def find_job(text: str) -> Job:
    """By its id or the beginning of it, as tables show it."""
    found = list(Job.objects.filter(id__startswith=text.lower())[:2]) if _BEGINNING.fullmatch(text) else []
    if not found:
        raise CommandError(
            f"There is no job {quote(text)}; manage.py jobs tells which there are, by the first digits of "
            "their ids."
        )
    if len(found) > 1:
        raise CommandError(f"{quote(text)} begins the ids of several jobs; give more of it.")
    return found[0]


def find_replica_or_orphan(text: str) -> Replica | Orphan:
    """As `find_replica`, and an engine that nothing here accounts for by the id that its agent tells."""
    if _BEGINNING.fullmatch(text) and not Replica.objects.filter(id__startswith=text.lower()).exists():
        found = list(Orphan.objects.filter(replica__startswith=text.lower()).select_related("node"))
        if len({orphan.replica for orphan in found}) == 1:  # of a gang, each of its nodes has a part
            return found[0]
    return find_replica(text)


def print_consequences(stdout: OutputWrapper, found: Consequences) -> None:
    for says, headings, rows in consequences_tables(found):
        stdout.write(f"\n{says}:")
        print_table(stdout, headings, rows)
    if not found:
        stdout.write(NO_CONSEQUENCES)


@contextmanager
def asked_to_stop() -> Iterator[list[str]]:
    """What Ctrl-C and TERM put there, for the job to be stopped as every other door would have it; a second
    Ctrl-C waits for nothing."""
    asked: list[str] = []

    def note(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asked.append("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
