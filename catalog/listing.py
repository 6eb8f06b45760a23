"""Lists under /api/: narrowed, searched, ordered and read page by page.

What a list can be narrowed and ordered by stands beside its view and nowhere else. A parameter that is not
known, or cannot have its value, is refused in a sentence that lists what can be; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.core import signing
from django.db.models import DateTimeField, ExpressionWrapper, F, Func, Q, QuerySet, Value
from rest_framework.filters import BaseFilterBackend
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from catalog.reading import CatalogError, Fault, quote

DEFAULT_LIMIT, HIGHEST_LIMIT = 100, 1000


@dataclass(frozen=True, slots=True)
class Filter:
    """A parameter that narrows a list. `choices` are all that it can be; without any it may be every text."""

    says: str
    find: Callable[[str], Q]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """How a list can be asked for.

    `orders`: parameter -> column, which is never null; the first one is the order of who asks for none, and
    `newest_first` turns it round. `search` finds a text where people would look for it.
    """

    orders: Mapping[str, str]
    filters: Mapping[str, Filter]
    search: Callable[[str], Q]
    newest_first: bool = False

    @property
    def possible_orders(self) -> tuple[str, ...]:
        return (*self.orders, *(f"-{name}" for name in self.orders))

    @property
    def default_order(self) -> str:
        return ("-" if self.newest_first else "") + next(iter(self.orders))

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.filters, "search", "order", "limit", "cursor")


def refused(field: str, code: str, sentence: str) -> CatalogError:
    return CatalogError([Fault("", "", field, code, sentence)])


def check_parameters(request: Request, known: Iterable[str]) -> None:
    """Raises CatalogError for what the address does not know, has twice, or no column could hold."""
    known = tuple(known)
    for name, values in request.query_params.lists():
        if name not in known:
            these = f"these are: {', '.join(known)}" if known else "there is none here"
            raise refused("", "unknown_parameter", f"the parameter {quote(name)} is not known; {these}")
        if len(values) > 1:
            raise refused(name, "duplicate", f"the parameter {name} is given more than once; give it once")
        if "\0" in values[0]:
            raise refused(name, "characters", f"the parameter {name} holds a NUL character; remove it")


def choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises CatalogError for a value that is none of these; without any, all are."""
    if choices and value not in choices:
        says = f"{name} cannot be {quote(value)}; it is one of {', '.join(choices)}"
        raise refused(name, "unknown_choice", says)


class Narrowing(BaseFilterBackend):
    """`?state=ready&search=llama`: all of them must hold."""

    def filter_queryset(self, request: Request, queryset: QuerySet, view: Any) -> QuerySet:
        listing: Listing = view.listing
        for name, known in listing.filters.items():
            if (value := request.query_params.get(name)) is not None:
                choose(name, value, known.choices)
                queryset = queryset.filter(known.find(value))
        if text := request.query_params.get("search"):
            queryset = queryset.filter(listing.search(text))
        return queryset

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        listing: Listing = view.listing
        told = [_parameter(name, each.says, each.choices) for name, each in listing.filters.items()]
        return [*told, _parameter("search", "Those that hold this text, in any case of its letters.")]


class Moment(Func):
    """A moment that can be compared: SQLite compares texts, and has some in milliseconds, others finer."""

    template = "%(expressions)s"

    def as_sqlite(self, compiler: Any, connection: Any, **told: Any) -> Any:
        template = "STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f', %(expressions)s)"
        return self.as_sql(compiler, connection, template=template, **told)


def _field_of(model: Any, path: str) -> Any:
    """Of a path such as `node__name`: the column at its end."""
    *through, last = path.split("__")
    for name in through:
        model = model._meta.get_field(name).related_model
    return model._meta.get_field(last)


class Pages(BasePagination):
    """`results`, and the address of the `next` page.

    A page begins after the last row of the one before it, found by its value and its key: so a list can grow
    and shrink while it is read, and rows that stay are read once.
    """

    def paginate_queryset(self, queryset: QuerySet, request: Request, view: Any = None) -> list[Any]:
        listing: Listing = view.listing
        self._request, self._salt = request, f"{type(view).__name__} cursor"
        order = request.query_params.get("order", listing.default_order)
        choose("order", order, listing.possible_orders)
        column = listing.orders[order.removeprefix("-")]
        limit = self._limit(request)
        of = _field_of(queryset.model, column)
        comparable: Any = Moment if isinstance(of, DateTimeField) else ExpressionWrapper
        sign, beyond = ("-", "lt") if order.startswith("-") else ("", "gt")
        queryset = queryset.annotate(place=comparable(F(column), output_field=of))
        if cursor := request.query_params.get("cursor"):
            value, key = self._read(cursor, order)
            last = comparable(Value(of.to_python(value), output_field=of), output_field=of)
            queryset = queryset.filter(
                Q(**{f"place__{beyond}": last}) | Q(**{"place": last, f"pk__{beyond}": key})
            )
        rows = list(queryset.order_by(f"{sign}place", f"{sign}pk")[: limit + 1])
        self._next = self._write(order, rows[limit - 1], column) if len(rows) > limit else None
        return rows[:limit]

    def get_paginated_response(self, data: Any) -> Response:
        url = self._request.build_absolute_uri()
        following = replace_query_param(url, "cursor", self._next) if self._next else None
        return Response({"results": data, "next": following})

    def _limit(self, request: Request) -> int:
        text = request.query_params.get("limit", str(DEFAULT_LIMIT))
        if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= HIGHEST_LIMIT):
            says = f"limit must be a whole number from 1 to {HIGHEST_LIMIT}, and is {quote(text)}"
            raise refused("limit", "range", says)
        return int(text)

    def _write(self, order: str, row: Any, column: str) -> str:
        value = getattr(row, column)
        is_moment = hasattr(value, "isoformat")
        last = [order, value.isoformat() if is_moment else str(value), str(row.pk)]
        return signing.dumps(last, salt=self._salt)

    def _read(self, cursor: str, order: str) -> tuple[str, str]:
        """Signed, because a column takes its word for the value."""
        try:
            of_order, value, key = signing.loads(cursor, salt=self._salt)
        except signing.BadSignature:
            raise refused("cursor", "cursor", "cursor is none of this list; begin without it") from None
        if of_order != order:
            says = (
                f"cursor is of the list in the order {of_order}; keep that order, or begin without the cursor"
            )
            raise refused("cursor", "cursor", says)
        return value, key

    def get_paginated_response_schema(self, schema: Any) -> dict[str, Any]:
        following = {"type": "string", "format": "uri", "nullable": True, "description": "the next page"}
        return {
            "type": "object",
            "required": ["results", "next"],
            "properties": {"results": schema, "next": following},
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        listing: Listing = view.listing
        limit = {"type": "integer", "minimum": 1, "maximum": HIGHEST_LIMIT, "default": DEFAULT_LIMIT}
        return [
            _parameter("order", f"{listing.default_order}, if left out.", listing.possible_orders),
            _parameter("limit", "How many at a time.") | {"schema": limit},
            _parameter("cursor", "Where the page begins: part of `next`, and of no other list."),
        ]


def _parameter(name: str, says: str, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if choices:
        schema["enum"] = list(choices)
    return {"name": name, "in": "query", "required": False, "description": says, "schema": schema}
