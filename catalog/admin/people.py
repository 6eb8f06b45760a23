"""Users and groups in the admin: nobody gives anybody more than they have themselves.

Django's own pages let whoever may edit users make themselves a superuser. Here one edits those who may no
more than oneself, and gives away what one has. What was done is an event like any other.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, Permission, User
from django.db.models import QuerySet
from django.http import HttpRequest

from catalog.actions import record
from catalog.actions.keys import may_all_of, permissions_of

admin.site.unregister(User)
admin.site.unregister(Group)


class _Recorded:
    """Each change is an event; which fields, and not what they hold."""

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._record("add", request, obj, message)
        return super().log_addition(request, obj, message)

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        self._record("edit", request, obj, message)
        return super().log_change(request, obj, message)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        for row in queryset:
            self._record("remove", request, row, [])
        return super().log_deletions(request, queryset)

    def _record(self, verb: str, request: HttpRequest, row: Any, message: Any) -> None:
        fields = [field for part in message for field in part.get("changed", {}).get("fields", ())]
        kind, by = str(row._meta.model_name), request.user.get_username()
        detail = {"fields": fields} if fields else {}
        record(verb, kind, str(row), subject_key=row.pk, by=by, door="admin", detail=detail)


@admin.register(User)
class PeopleAdmin(_Recorded, UserAdmin):
    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        return super().has_change_permission(request, obj) and (obj is None or may_all_of(request.user, obj))

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        return super().has_delete_permission(request, obj) and (obj is None or may_all_of(request.user, obj))

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> Any:
        mine = () if request.user.is_superuser else ("is_superuser", "user_permissions")
        return (*super().get_readonly_fields(request, obj), "last_login", "date_joined", *mine)

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field: Any = super().formfield_for_manytomany(db_field, request, **kwargs)
        if db_field.name == "groups" and not request.user.is_superuser:
            field.queryset = _groups_within(request.user)
        return field


@admin.register(Group)
class RoleAdmin(_Recorded, GroupAdmin):
    def has_change_permission(self, request: HttpRequest, obj: Group | None = None) -> bool:
        return super().has_change_permission(request, obj) and self._is_within(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Group | None = None) -> bool:
        return super().has_delete_permission(request, obj) and self._is_within(request, obj)

    def _is_within(self, request: HttpRequest, group: Group | None) -> bool:
        return group is None or _groups_within(request.user).filter(pk=group.pk).exists()

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field: Any = super().formfield_for_manytomany(db_field, request, **kwargs)
        if db_field.name == "permissions" and not request.user.is_superuser:
            field.queryset = field.queryset.filter(pk__in=permissions_of(request.user).values("pk"))
        return field


def _groups_within(user: Any) -> QuerySet[Group]:
    """The groups that give nothing which this user has not."""
    if user.is_superuser:
        return Group.objects.all()
    others = Permission.objects.exclude(pk__in=permissions_of(user).values("pk"))
    return Group.objects.exclude(permissions__in=others)
