"""What every test may count on: the database that was asked for, in a file when it is SQLite."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.conf import settings
from django.contrib.auth.models import Group, Permission
from django.contrib.contenttypes.management import create_contenttypes
from django.contrib.contenttypes.models import ContentType
from django.db import connection, transaction
from django.db.models import Model
from django.db.models.signals import post_migrate
from django.test.utils import setup_databases, teardown_databases
from hypothesis import settings as trials
from servestatic.middleware import ServeStaticMiddleware

from tests.fake_agent import FakeAgent, joining

MADE_BY_MIGRATIONS = (ContentType, Permission, Group, Group.permissions.through)


def pytest_configure() -> None:
    """Passwords are hashed in a moment, not in the third of a second that keeps guessers busy. A hub is asked
    each time: what one test's hub said is nothing to the next, which may have its port. Requests are not told
    of on stdout, which is pytest's. One example of Hypothesis' may take long: other tests run beside it; each
    law is tried on the same examples every day, and in `make soak` on a thousand others."""
    settings.LLMGW_ACCESS_LOG = "off"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.LLMGW_HUB_CACHE_S = 0
    trials.register_profile("every day", deadline=None, max_examples=50, derandomize=True)
    trials.register_profile("soak", deadline=None, max_examples=1000)
    trials.load_profile("soak" if "SOAK_STEPS" in os.environ else "every day")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes each takes the next file (`--no-loadscope-reorder`): those whose tests take half a
    minute each come first, so that the others have something to do meanwhile; then those of many tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        count = Counter(item.path for item in items)
        long = {item.path for item in items if item.get_closest_marker("e2e")}
        items.sort(key=lambda item: (item.path not in long, -count[item.path], item.path))


def pytest_collection_finish() -> None:
    """Thousands of tests lie in memory for as long as one of them runs: the garbage collector need not look
    through them each time, which is a tenth of what the tests take."""
    gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The run on PostgreSQL, which asks for tests of a database alone, reads no file without any."""
    if connection.vendor == "sqlite" or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if "django_db" in text or "lasting_database" in text else True


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None) -> None:
    """SQLite in memory locks tables, not a file, and has no WAL: it would not be the database that runs."""
    if connection.vendor == "sqlite":
        connection.settings_dict["TEST"]["NAME"] = str(settings.LLMGW_VAR / "test.sqlite3")


@pytest.fixture(scope="session")
def django_db_setup(
    django_test_environment: None, django_db_modify_db_settings: None, django_db_blocker: Any
) -> Iterator[None]:
    """Whoever asks for a database has one: pytest-django's own makes it only for tests that are marked so,
    and those of a lasting database are not."""
    wanted = os.environ.get("LLMGW_TEST_DATABASE", "sqlite")
    assert connection.vendor == wanted, f"the tests run on {connection.vendor}, and {wanted} was asked for"
    with django_db_blocker.unblock():
        made = setup_databases(verbosity=0, interactive=False, serialized_aliases=())
        kept = [_kept(model) for model in MADE_BY_MIGRATIONS]

    def bring_back(**told: Any) -> None:
        """A test with transactions of its own empties every table, and what migrations made is gone, too."""
        with transaction.atomic(), connection.cursor() as cursor:
            for insert, values in kept:
                cursor.execute(insert, values)

    # Django would look for it all, app by app.
    post_migrate.disconnect(create_contenttypes)
    post_migrate.disconnect(dispatch_uid="django.contrib.auth.management.create_permissions")
    post_migrate.connect(bring_back, sender=apps.get_app_config("auth"), weak=False)
    with pytest.MonkeyPatch.context() as library:
        if connection.vendor == "postgresql":
            library.setattr(type(connection.ops), "sql_flush", _emptied)
        yield
    with django_db_blocker.unblock():
        teardown_databases(made, verbosity=0)


def _kept(model: type[Model]) -> tuple[str, list[Any]]:
    """What writes its rows again, all at once, and their values."""
    fields = model._meta.concrete_fields
    rows = list(model._default_manager.values_list(*(field.attname for field in fields)))
    table = connection.ops.quote_name(model._meta.db_table)
    columns = ", ".join(connection.ops.quote_name(field.column) for field in fields)
    places = ", ".join([f"({', '.join(['%s'] * len(fields))})"] * len(rows))
    insert = f"INSERT INTO {table} ({columns}) VALUES {places} ON CONFLICT DO NOTHING"
    return insert, [value for row in rows for value in row]


def _emptied(operations: Any, style: Any, tables: Sequence[str], **cascading: Any) -> list[str]:
    """PostgreSQL truncates fifty tables in a tenth of a second, even if there was nothing in them. Which hold
    something is known in a hundredth of that, and constraints are looked at when all of it is gone."""
    names = [operations.quote_name(table) for table in tables]
    with operations.connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(f"SELECT '{each}' WHERE EXISTS (TABLE {each})" for each in names))
        return [f"DELETE FROM {name}" for (name,) in cursor.fetchall()]


@pytest.fixture(scope="session", autouse=True)
def _pages_files_are_looked_for_once() -> Iterator[None]:
    """And not for each test's client, which would take as long as the pages that it asks for."""
    files: dict[str, Any] = {}
    look = ServeStaticMiddleware.add_files_from_finders

    def look_once(middleware: ServeStaticMiddleware) -> None:
        if not files:
            look(middleware)
            files.update(middleware.files)
        middleware.files = files

    with pytest.MonkeyPatch.context() as library:
        library.setattr(ServeStaticMiddleware, "add_files_from_finders", look_once)
        yield


@pytest.fixture
def agent_of() -> Iterator[Callable[..., FakeAgent]]:
    with ExitStack() as stack:
        yield joining(stack)
