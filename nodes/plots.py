"""How series look through REST, and on the admin's pages, where `plot.js` draws them."""

from __future__ import annotations

from urllib.parse import quote

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers as shapes
from rest_framework.request import Request

from catalog.listing import check_parameters
from catalog.schema import MODEL_NAME
from nodes.sampling import CLUSTER, MODEL, NODE, SPANS, Span
from nodes.series import USUAL_SPAN, span_of

# --- through REST ---------------------------------------------------------------------------------


class LineSerializer(shapes.Serializer):
    """One of a plot's lines."""

    name = shapes.CharField()
    label = shapes.CharField(help_text="For people.")  # type: ignore[assignment]  # a field's own, as well
    values = shapes.ListField(
        child=shapes.FloatField(allow_null=True), help_text="null: nothing is known of that step."
    )


class PlotSerializer(shapes.Serializer):
    """Lines that are looked at together."""

    name = shapes.CharField()
    title = shapes.CharField(help_text="For people.")
    unit = shapes.CharField(help_text="Of all its values.")
    lines = shapes.ListField(child=LineSerializer())


class SeriesSerializer(shapes.Serializer):
    """What plots show. Each line has `count` values, `step_s` seconds apart, the first of `begins_at`; the
    last one is that of the last whole step."""

    kind = shapes.ChoiceField([CLUSTER, MODEL, NODE])
    name = shapes.CharField(allow_blank=True, help_text="Empty: the cluster.")
    span = shapes.ChoiceField(list(SPANS))
    begins_at = shapes.DateTimeField()
    step_s = shapes.IntegerField()
    count = shapes.IntegerField()
    note = shapes.CharField(allow_blank=True, help_text="Why some plots are not here; empty: all are.")
    plots = shapes.ListField(child=PlotSerializer())


_SPAN = OpenApiParameter(
    "span", str, enum=list(SPANS), description=f"How long until now; {USUAL_SPAN} unless told."
)
_NODE_NAME = OpenApiParameter("name", str, OpenApiParameter.PATH, description="It may hold slashes.")
_SAMPLED = "Replicas, GPUs and memory are sampled once a minute."
_ALL = f"{_SAMPLED} What requests came to is told to whoever may see what all keys used."

describe_model_series = extend_schema(
    summary="How a model did", description=_ALL, parameters=[MODEL_NAME, _SPAN], responses=SeriesSerializer
)
describe_node_series = extend_schema(
    summary="How a node did", description=_SAMPLED, parameters=[_NODE_NAME, _SPAN], responses=SeriesSerializer
)
describe_cluster_series = extend_schema(
    summary="How the cluster did", description=_ALL, parameters=[_SPAN], responses=SeriesSerializer
)


def asked_span(request: Request) -> Span:
    """Raises CatalogError for another parameter, and for a span that is not kept."""
    check_parameters(request, ("span",))
    return span_of(request.query_params.get("span", USUAL_SPAN))


# --- on a page ------------------------------------------------------------------------------------


def model_figure(name: str) -> SafeString:
    return figure(f"/api/models/{quote(name, safe='')}/series", f"Plots of {name}", has_spans=True)


def node_figure(name: str) -> SafeString:
    return figure(f"/api/nodes/{quote(name, safe='')}/series", f"Plots of {name}", has_spans=True)


def figure(url: str, title: str, *, has_spans: bool = False) -> SafeString:
    """A place that `plot.js` fills with what is told at the address, as it describes itself. has_spans: they
    can be chosen between."""
    links = [(span.name, span.words) for span in SPANS.values()] if has_spans else []
    choice = '<nav class="spans" aria-label="Span">{}</nav>' if links else "{}"
    spans = format_html(choice, format_html_join("", '<a href="?span={}">{}</a>', links))
    return format_html(
        '<figure class="plot" data-kept data-url="{}" aria-label="{}">{}<noscript><p>Plots need JavaScript; '
        '<a href="{}">the figures</a> do not.</p></noscript></figure>',
        url,
        title,
        spans,
        url,
    )
