"""How old what a row tells is, by the database's own clock."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from django.db import models
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet
from django.db.models.functions import Now

Row = TypeVar("Row", bound=models.Model)


def with_age(rows: QuerySet[Row], since: str) -> QuerySet[Row]:
    """Each row with `age`, a timedelta since the moment in that column; None where the column is empty."""
    age = ExpressionWrapper(Now() - F(since), DurationField())
    return rows.annotate(age=age)  # type: ignore[return-value]  # the stubs forget which model it was


def seconds(age: timedelta | None) -> float | None:
    return None if age is None else max(age.total_seconds(), 0.0)
