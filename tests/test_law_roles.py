"""The roles: what their migration makes, adds to, and takes back."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

pytestmark = pytest.mark.django_db

roles = import_module("llmgw.migrations.0001_roles")
reconciler = import_module("llmgw.migrations.0002_reconciler")
usage = import_module("llmgw.migrations.0003_usage")
joining = import_module("llmgw.migrations.0004_joining")
weights = import_module("llmgw.migrations.0005_weights")
jobs = import_module("llmgw.migrations.0006_jobs")
notices = import_module("llmgw.migrations.0007_notices")


def run(step: Any, name: str = "0001_roles") -> None:
    """A step of the migration, with the models as they were at its time."""
    state = MigrationExecutor(connection).loader.project_state([("llmgw", name)])
    step(state.apps, SimpleNamespace(connection=connection))


def may(role: str) -> set[str]:
    return {each.codename for each in Group.objects.get(name=role).permissions.all()}


def test_each_role_may_what_the_one_below_it_may_and_more() -> None:
    assert may("viewer") == {
        "view_cluster", "view_event", "view_job", "view_jointoken", "view_key", "view_model", "view_node",
        "view_orphan", "view_replica", "view_usage", "view_webhook", "view_weights",
    }  # fmt: skip
    assert may("operator") - may("viewer") == {
        "add_job", "add_key", "add_model", "add_weights", "all_usage", "change_cluster", "change_job",
        "change_key", "change_model", "change_node", "change_replica", "delete_model", "delete_weights",
        "see_env",
    }  # fmt: skip
    assert may("admin") - may("operator") == {
        "add_group", "add_node", "add_user", "add_webhook", "any_key", "change_group", "change_user",
        "change_webhook", "delete_group", "delete_node", "delete_user", "delete_webhook", "view_group",
        "view_user",
    }  # fmt: skip
    assert may("viewer") < may("operator") < may("admin")


def test_roles_are_made_where_not_even_permissions_are_there() -> None:
    Group.objects.all().delete()
    Permission.objects.all().delete()
    run(roles.give)
    assert may("viewer") < may("operator") < may("admin")


def test_a_group_of_that_name_keeps_what_an_operator_gave_it() -> None:
    group = Group.objects.get(name="viewer")
    group.permissions.set(Permission.objects.filter(codename="add_user"))
    member = User.objects.create_user("viola")
    member.groups.add(group)
    run(roles.give)
    run(roles.give)
    assert may("viewer") == {"add_user"} | roles.VIEWER["catalog"] | roles.VIEWER["nodes"]
    assert list(group.user_set.all()) == [member]


def test_going_back_takes_groups_that_nobody_uses() -> None:
    run(notices.take_back, "0007_notices")
    run(jobs.take_back, "0006_jobs")
    run(weights.take_back, "0005_weights")
    run(joining.take_back, "0004_joining")
    run(usage.take_back, "0003_usage")
    run(reconciler.take_back, "0002_reconciler")
    Group.objects.get(name="operator").user_set.add(User.objects.create_user("otto"))
    Group.objects.get(name="admin").permissions.add(Permission.objects.get(codename="add_session"))
    run(roles.take_back)
    assert set(Group.objects.values_list("name", flat=True)) == {"operator", "admin"}


@pytest.mark.parametrize(
    ("step", "name", "given"),
    [
        (
            reconciler,
            "0002_reconciler",
            {"viewer": {"view_cluster"}, "operator": {"view_cluster", "change_cluster"}},
        ),
        (usage, "0003_usage", {"viewer": {"view_usage"}, "operator": {"view_usage", "all_usage"}}),
        (joining, "0004_joining", {"viewer": {"view_jointoken"}, "operator": {"view_jointoken"}}),
        (
            weights,
            "0005_weights",
            {"viewer": {"view_weights"}, "operator": {"view_weights", "add_weights", "delete_weights"}},
        ),
        (jobs, "0006_jobs", {"viewer": {"view_job"}, "operator": {"view_job", "add_job", "change_job"}}),
        (notices, "0007_notices", {"viewer": {"view_webhook"}, "operator": {"view_webhook"}}),
    ],
    ids=[
        "for the reconciler",
        "for usage",
        "for machines that join",
        "for weights",
        "for jobs",
        "for notices",
    ],
)
def test_what_was_given_later_is_given_once_and_taken_back(
    step: Any, name: str, given: dict[str, set[str]]
) -> None:
    before = {role: may(role) for role in given}
    run(step.take_back, name)
    assert {role: before[role] - may(role) for role in given} == given
    Group.objects.get(name="admin").delete()
    for _ in range(2):
        run(step.give, name)
    assert {role: may(role) for role in given} == before
    assert not Group.objects.filter(name="admin").exists(), "an operator has taken it away"
