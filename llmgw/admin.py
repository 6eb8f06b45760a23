"""The admin's site: how one logs in, and what an operator sees first."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.admin import AdminSite
from django.contrib.admin.forms import AdminAuthenticationForm
from django.contrib.auth.forms import UsernameField
from django.http import HttpRequest, HttpResponse

from nodes.overview import look
from nodes.pieces import overview_shown


class LoginForm(AdminAuthenticationForm):
    """A name longer than any user's is refused before it is looked for and counted among the failures."""

    username = UsernameField(max_length=150, widget=forms.TextInput(attrs={"autofocus": True}))


class Site(AdminSite):
    site_header = site_title = "llmgw"
    site_url = None  # there is no other site to view
    index_title = "What there is"
    login_form = LoginForm

    def index(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().index(request, overview_shown(look(request.user)) | (extra_context or {}))

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> Any:
        """Users and groups come last: they are what an operator seldom looks for."""
        return sorted(super().get_app_list(request, app_label), key=lambda app: app["app_label"] == "auth")
