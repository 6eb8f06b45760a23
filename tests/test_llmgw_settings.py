"""What the environment says to llmgw: what can be read, what cannot, and secrets made on first use."""

from __future__ import annotations

import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "llmgw" / "settings.py"
SECRET = "0123456789abcdef" * 2


def ask(var: Path, *names: str, **environment: str) -> dict[str, str]:
    """These settings in an environment that holds nothing else. Raises ImproperlyConfigured."""
    with mock.patch.dict(os.environ, {"LLMGW_VAR": str(var), **environment}, clear=True):
        settings = runpy.run_path(str(SETTINGS))
    return {name: repr(settings[name]) for name in names}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "LLMGW_WEBHOOK_NETWORKS",
            "10.0.0.1/8",
            "LLMGW_WEBHOOK_NETWORKS is '10.0.0.1/8', which is not a list of networks such as",
        ),
        ("LLMGW_GATEWAYS", "gw:8000", "LLMGW_GATEWAYS is 'gw:8000', which is not a list of URLs that begin"),
        ("LLMGW_TICK_S", "often", "LLMGW_TICK_S is 'often', which is not a number of seconds above 0"),
        ("LLMGW_HOLD_S", "-1", "LLMGW_HOLD_S is '-1', which is not a number of seconds above 0"),
        (
            "LLMGW_STALL_S",
            "301",
            "LLMGW_STALL_S is '301', which is not a number of seconds above 0 and up to 300",
        ),
        ("LLMGW_LEASE_S", "nan", "LLMGW_LEASE_S is 'nan', which is not a number of seconds above 0"),
        ("LLMGW_IDLE_TIMEOUT", "15", "LLMGW_IDLE_TIMEOUT is '15', which is not a duration such as 15m"),
        (
            "LLMGW_MAX_BODY_BYTES",
            "1MB",
            "LLMGW_MAX_BODY_BYTES is '1MB', which is not a whole number of bytes",
        ),
        ("LLMGW_PLAIN_HTTP", "maybe", "LLMGW_PLAIN_HTTP is 'maybe', which is not 1 or 0"),
        (
            "LLMGW_HUB_ENDPOINT",
            "hf.co",
            "LLMGW_HUB_ENDPOINT is 'hf.co', which is not a URL that begins with https://",
        ),
        (
            "DATABASE_URL",
            "mysql://x/y",
            "DATABASE_URL is 'mysql://x/y', which is not a URL that begins with postgres",
        ),
        (
            "REDIS_URL",
            "localhost:6379",
            "REDIS_URL is 'localhost:6379', which is not a URL that begins with redis://",
        ),
    ],
    ids=lambda value: value if value.isupper() else "",
)
def test_a_value_that_cannot_be_read_is_named(tmp_path: Path, name: str, value: str, sentence: str) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        ask(tmp_path, **{name: value})
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("environment", "is_offline"),
    [
        ({}, "False"),
        ({"LLMGW_OFFLINE": "1"}, "True"),
        ({"HF_HUB_OFFLINE": "1"}, "True"),
        ({"HF_HUB_OFFLINE": "0"}, "False"),
    ],
    ids=["nothing is said", "by our name for it", "by the hub's", "the hub's says no"],
)
def test_offline_is_said_by_either_name(tmp_path: Path, environment: dict[str, str], is_offline: str) -> None:
    assert ask(tmp_path, "LLMGW_OFFLINE", **environment) == {"LLMGW_OFFLINE": is_offline}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLMGW_SECRET", "too short"),
        ("LLMGW_CLUSTER_KEYS", "k1:abcdef"),
        ("LLMGW_CLUSTER_KEYS", f"{SECRET}{SECRET}"),
        ("LLMGW_CLUSTER_KEYS", f"k1:{SECRET}{SECRET},k2:not hexadecimal"),
    ],
    ids=["a short secret", "a short key", "a key without an id", "a second key that is not hexadecimal"],
)
def test_a_bad_secret_is_named_and_not_repeated(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        ask(tmp_path, **{name: value})
    assert str(refused.value).startswith(f"{name} is not ")
    assert value not in str(refused.value)


def test_the_first_of_several_cluster_keys_mints(tmp_path: Path) -> None:
    answer = ask(tmp_path, "LLMGW_CLUSTER_KEYS", LLMGW_CLUSTER_KEYS=f"new:{SECRET}{SECRET}, old:{'ab' * 32}")
    assert answer["LLMGW_CLUSTER_KEYS"].index("new") < answer["LLMGW_CLUSTER_KEYS"].index("old")


def test_without_an_environment_everything_is_in_one_private_folder(tmp_path: Path) -> None:
    var = tmp_path / "var"
    answer = ask(
        var, "DATABASES", "CELERY_BROKER_URL", "CELERY_BROKER_TRANSPORT_OPTIONS", "DEBUG", "ALLOWED_HOSTS"
    )
    assert f"{var}/db.sqlite3" in answer["DATABASES"]
    assert answer["CELERY_BROKER_URL"] == "'filesystem://localhost/'"
    assert str(var) in answer["CELERY_BROKER_TRANSPORT_OPTIONS"]
    assert answer["DEBUG"] == "False"
    assert answer["ALLOWED_HOSTS"] == "['localhost', '127.0.0.1', '[::1]']"
    assert stat.S_IMODE(var.stat().st_mode) == 0o700
    assert stat.S_IMODE((var / "secret").stat().st_mode) == 0o600


def test_processes_that_start_at_once_agree_on_the_secret(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "from llmgw import settings; print(settings.SECRET_KEY)"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "LLMGW_VAR": str(tmp_path / "var")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    (answer,) = {process.communicate(timeout=30)[0] for process in processes}
    assert len(answer) == 65
    assert [path.name for path in (tmp_path / "var").iterdir() if path.is_file()] == ["secret"]


def test_each_use_of_the_secret_has_a_key_of_its_own(tmp_path: Path) -> None:
    names = ("SECRET_KEY", "LLMGW_KEY_PEPPER", "LLMGW_CLUSTER_KEYS")
    first = ask(tmp_path, *names, LLMGW_SECRET=SECRET)
    assert first == ask(tmp_path, *names, LLMGW_SECRET=SECRET)
    assert first["SECRET_KEY"] != ask(tmp_path, *names, LLMGW_SECRET=SECRET[::-1])["SECRET_KEY"]
    assert not (tmp_path / "secret").exists()
    assert not any(SECRET in value for value in first.values())


def test_database_and_broker_are_chosen_by_their_urls(tmp_path: Path) -> None:
    answer = ask(
        tmp_path,
        *("DATABASES", "CELERY_BROKER_URL", "CELERY_BROKER_TRANSPORT_OPTIONS"),
        DATABASE_URL="postgresql://llmgw:pw@db.example/llmgw?sslmode=require&connect_timeout=1",
        REDIS_URL="redis://cache.example:6379/1",
    )
    assert "django.db.backends.postgresql" in answer["DATABASES"]
    for option in ("'sslmode': 'require'", "'connect_timeout': 1,", "'tcp_user_timeout': 10000"):
        assert option in answer["DATABASES"]
    assert answer["CELERY_BROKER_URL"] == "'redis://cache.example:6379/1'"
    assert "'visibility_timeout': 5" in answer["CELERY_BROKER_TRANSPORT_OPTIONS"]


def test_only_plain_http_on_request_lets_cookies_travel_unencrypted(tmp_path: Path) -> None:
    names = ("SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_SSL_REDIRECT")
    assert set(ask(tmp_path, *names).values()) == {"True"}
    assert set(ask(tmp_path, *names, LLMGW_PLAIN_HTTP="1").values()) == {"False"}


def test_messages_are_json_and_ticks_expire(tmp_path: Path) -> None:
    answer = ask(
        tmp_path, "CELERY_ACCEPT_CONTENT", "CELERY_TASK_SERIALIZER", "CELERY_BEAT_SCHEDULE", LLMGW_TICK_S="7"
    )
    assert answer["CELERY_ACCEPT_CONTENT"] == "['json']"
    assert answer["CELERY_TASK_SERIALIZER"] == "'json'"
    assert "'expires': 7.0" in answer["CELERY_BEAT_SCHEDULE"]


def test_a_command_tells_it_in_one_line(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "LLMGW_VAR": str(tmp_path), "LLMGW_TICK_S": "often"}
    command = [sys.executable, "manage.py", "models"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "LLMGW_TICK_S is 'often', which is not a number of seconds above 0, such as 2 or 0.5.\n"
    )
