"""`manage.py gateway`: /v1/ alone, with /healthz, /readyz and /metrics, where the admin runs elsewhere."""

from __future__ import annotations

from llmgw.management.commands import web


class Command(web.Command):
    help = "Serve /v1/ alone, without the admin and /api/. SIGHUP replaces its processes one by one."
    app = "llmgw.asgi:gateway"
