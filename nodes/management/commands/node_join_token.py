"""`manage.py node_join_token`: a token, and the one line that a machine joins by."""

from __future__ import annotations

import ipaddress
from argparse import ArgumentParser
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from catalog.reading import quote
from catalog.typed import read_duration, read_pairs
from nodes.bundle import join_line
from nodes.joining import mint_join_token, revoke_join_token
from nodes.models import JoinToken
from nodes.tokens import join_tokens, token_as_dict


class Command(BaseCommand):
    help = "Print a line that makes the machine it is run on a node, and the token that it asks for."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", default="", help="the node's; the machine's own, if left out")
        parser.add_argument("--url", help="where the machine reaches llmgw, such as https://llmgw.example")
        parser.add_argument("--label", action="append", default=[], metavar="NAME=VALUE")
        parser.add_argument("--expires-in", metavar="TIME", help="up to 168h; 1h, if left out")
        parser.add_argument(
            "--plain-http",
            action="store_true",
            help="gateways reach its engines without TLS, unless the agent is told --engine-tls; over a "
            "network that is trusted or encrypted",
        )
        parser.add_argument(
            "--engine-tls",
            action="store_true",
            help="its engines answer gateways over TLS alone, with the agent's own certificate",
        )
        parser.add_argument("--revoke", metavar="ID", help="let no machine join with this one any more")
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        if options["revoke"]:
            self._revoke(options["revoke"], why)
            return
        url = _checked_url(options["url"] or "")
        with refusals():
            expires_in = options["expires_in"]
            token, text = mint_join_token(
                name=name,
                labels=read_pairs("\n".join(options["label"])),
                lives_ns=None if expires_in is None else read_duration("expires_in", expires_in),
                by=who(),
                door=DOOR,
                why=why,
            )
        flags = {"--plain-http": options["plain_http"], "--engine-tls": options["engine_tls"]}
        line = join_line(url, [flag for flag, is_given in flags.items() if is_given])
        if options["json"]:
            told = token_as_dict(join_tokens().get(pk=token.pk))
            print_json(self.stdout, told | {"token": text, "line": line})
            return
        self.stderr.write("On the machine, as root for a service of the system, run:")
        self.stdout.write(line)
        self.stderr.write(f"\nIt asks for this token, which works once, until {token.expires_at:%H:%M} UTC:")
        self.stdout.write(text)

    def _revoke(self, text: str, why: str) -> None:
        with refusals():
            token = JoinToken.objects.filter(pk=text).first()
            if token is None or not revoke_join_token(token, by=who(), door=DOOR, why=why):
                raise CommandError(f"There is no live join token {quote(text)}; the admin lists them.")
        self.stdout.write(f"Revoked {text}.")


def _checked_url(text: str) -> str:
    parts = urlsplit(text)
    is_plain_allowed = settings.LLMGW_PLAIN_HTTP or _is_loopback(parts.hostname or "")
    schemes = ("http", "https") if is_plain_allowed else ("https",)
    if parts.scheme not in schemes or not parts.netloc or parts.path.strip("/") or parts.query:
        raise CommandError(
            f"--url {text or 'is missing'}: give scheme and host by which the machine reaches llmgw, such as "
            "https://llmgw.example (http:// on loopback, and where LLMGW_PLAIN_HTTP is set)."
        )
    return text.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
