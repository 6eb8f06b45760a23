"""The README tells of every variable, and of nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.core.management import get_commands

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_variable_that_settings_read_is_told_of() -> None:
    settings = (ROOT / "llmgw" / "settings.py").read_text()
    read = set(re.findall(r'"((?:LLMGW|HF)_[A-Z_]+|DATABASE_URL|REDIS_URL)"', settings))
    told = set(re.findall(r"`((?:LLMGW|HF)_[A-Z_]+|DATABASE_URL|REDIS_URL)`", README))
    assert read == told


@pytest.mark.parametrize("command", sorted(set(re.findall(r"manage\.py ([a-z_]+)", README)) - {"help"}))
def test_commands_in_the_readme_exist(command: str) -> None:
    assert command in get_commands()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:catalog|nodes|llmgw)/[\w/.]*)`", README))))
def test_files_in_the_readme_exist(path: str) -> None:
    assert "NAME" in path or (ROOT / path).exists()


def test_pictures_in_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).exists() for picture in pictures)
