"""Profiles in the admin: the part of a model's page that says how it can run."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from catalog.forms import ProfileForm, ProfileFormSet
from catalog.models import Model, Profile


class ProfileInline(admin.StackedInline):
    model = Profile
    form = ProfileForm
    formset = ProfileFormSet
    extra = 0
    min_num = 1
    verbose_name_plural = "profiles: the ways to run it, one for each GPU class"
    fieldsets = (
        (
            None,
            {
                "fields": (
                    ("name", "engine", "gpu_class"),
                    ("tp", "pp", "nodes", "gpus_per_node"),
                    ("min_memory_gb", "min_disk_gb", "startup_timeout"),
                    ("priority", "weight"),
                    ("args", "env", "node_selector"),
                )
            },
        ),
    )

    # Profiles are part of their model: whoever may edit the one may edit the other.

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return request.user.has_perm("catalog.change_model" if obj else "catalog.add_model")

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return self.has_add_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return self.has_add_permission(request, obj)

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return request.user.has_perm("catalog.view_model") or self.has_add_permission(request, obj)
