"""How commands find the node or replica that an operator names, and tell what a change would bring about."""

from __future__ import annotations

import re

from django.core.management.base import CommandError, OutputWrapper

from catalog.management.shell import print_table
from catalog.reading import quote
from nodes.consequences import Consequences
from nodes.models import Node, Replica
from nodes.telling import NO_CONSEQUENCES, consequences_tables

SHORTEST_ID = 4  # digits that tell replicas apart well enough to be typed


def find_node(name: str) -> Node:
    node = Node.objects.filter(name=name).first()
    if node is None:
        raise CommandError(f"There is no node {quote(name)}; manage.py nodes tells which there are.")
    return node


def find_replica(text: str) -> Replica:
    """By its id or the beginning of it, as tables show it."""
    if not re.fullmatch(f"[0-9a-fA-F-]{{{SHORTEST_ID},36}}", text):
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


def print_consequences(stdout: OutputWrapper, found: Consequences) -> None:
    for says, headings, rows in consequences_tables(found):
        stdout.write(f"\n{says}:")
        print_table(stdout, headings, rows)
    if not found:
        stdout.write(NO_CONSEQUENCES)
