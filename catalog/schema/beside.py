"""What is sent beside a body: parameters and headers, and the answer that has no body."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, OpenApiResponse

WHY = OpenApiParameter("why", str, OpenApiParameter.QUERY, description="Kept in the history.")
MODEL_NAME = OpenApiParameter(
    "name", str, OpenApiParameter.PATH, description="The canonical name; it may hold slashes."
)
ETAG = OpenApiParameter(
    "ETag",
    str,
    OpenApiParameter.HEADER,
    response=True,
    description="The version of what is wanted, for If-Match. What is observed (`status`) has no part in it.",
)
IF_MATCH = OpenApiParameter(
    "If-Match",
    str,
    OpenApiParameter.HEADER,
    description="The ETag that you have read; 412 where somebody has changed it since. *: any.",
)
LOCATION = OpenApiParameter(
    "Location",
    str,
    OpenApiParameter.HEADER,
    response=[201, 202],
    description="The address of what was added.",
)
DRY_RUN = OpenApiParameter(
    "dry_run",
    str,
    OpenApiParameter.QUERY,
    enum=("true", "false", "1", "0"),
    description="true: judge all of it, save nothing, and tell what it would bring about.",
)
GONE = OpenApiResponse(description="Done; there is nothing more to tell.")
