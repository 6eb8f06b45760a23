"""The catalog in the admin: models with their profiles, API keys, people, and the history of it all."""

from __future__ import annotations

from catalog.admin.events import EventAdmin
from catalog.admin.keys import KeyAdmin
from catalog.admin.models import ModelAdmin
from catalog.admin.people import PeopleAdmin, RoleAdmin

__all__ = ["EventAdmin", "KeyAdmin", "ModelAdmin", "PeopleAdmin", "RoleAdmin"]
