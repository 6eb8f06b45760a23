"""The project: settings, doors of its own, and in `gateway/` the data plane."""

from llmgw.celery import app as celery_app

__all__ = ["celery_app"]
