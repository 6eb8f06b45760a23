"""`manage.py node_add`: registers a machine and writes the file that its agent proves itself with."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from catalog.management.shell import DOOR, refusals, who
from nodes.actions import register_node
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Register a node (again, to move it) and write its agent's identity file, which is a secret."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument(
            "--address", required=True, help="where its agent listens, as http://10.0.0.7:8378"
        )
        parser.add_argument(
            "--certificate",
            default="",
            metavar="SHA256",
            help="of the one its agent shows, where no authority vouches for it",
        )
        parser.add_argument(
            "--write", required=True, type=Path, metavar="FILE", help="the identity file (mode 0600)"
        )

    def handle(
        self, *args: Any, name: str, address: str, certificate: str, write: Path, **options: Any
    ) -> None:
        if not write.parent.is_dir():
            raise CommandError(f"There is no folder {write.parent} to write {write.name} to; make it first.")
        with refusals(), transaction.atomic():  # a node without its agent's file is not registered
            try:
                node, identity = register_node(name, address, certificate=certificate, by=who(), door=DOOR)
                _write_secret(write, json.dumps(identity, indent=2) + "\n")
            except OSError as problem:
                raise CommandError(
                    f"{write} could not be written: {problem.strerror}. Give another file."
                ) from None
        wake()
        self.stdout.write(
            f"{node.name} is registered at {node.address}. On it, with this file copied there, run:"
        )
        listen = node.address.partition("://")[2]
        self.stdout.write(f"  python -m nodes.agent --identity {write} --listen {listen} --state DIR")


def _write_secret(path: Path, text: str) -> None:
    """All of it or none, and never readable by others. A device is not replaced by a file."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is no file")
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:  # mode 0600
        try:
            draft.write(text)
            draft.flush()
            os.fsync(draft.fileno())
            os.replace(draft.name, path)
        except OSError:
            os.unlink(draft.name)
            raise
