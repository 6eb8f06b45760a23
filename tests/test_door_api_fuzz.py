"""REST under what nobody would send: bodies, parameters and headers of every type, made from its description.

Whatever comes in, an answer is one that the description tells of, and never a fault of our own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as bounded
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from llmgw.docs import schema
from nodes.models import Replica
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, model_form
from tests.rest_client import Api


def is_no_fault_of_ours(context: Any, response: Any, case: Any) -> bool | None:
    """503 is a no of somebody else's, such as an agent that is away, and has its sentence."""
    return None if response.status_code == 503 else not_a_server_error(context, response, case)


CHECKS = [
    is_no_fault_of_ours,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
IS_SOAK = "SOAK_STEPS" in os.environ
EXAMPLES = 200 if IS_SOAK else 10  # of each operation, sound and unsound ones

described = schemathesis.openapi.from_dict(schema())
described.app = get_wsgi_application()
OPERATIONS = [found.ok() for found in described.get_all_operations()]


@pytest.fixture
def lasting_connection(db: None) -> Iterator[None]:
    """As Django's own test client has it: a request's end does not end the test's transaction."""
    ends = (request_started, request_finished)
    for signal in ends:
        signal.disconnect(close_old_connections)
    yield
    for signal in ends:
        signal.connect(close_old_connections)


def test_every_operation_is_tried() -> None:
    assert {(each.method.upper(), each.path) for each in OPERATIONS} == {
        (method.upper(), path) for path, each in schema()["paths"].items() for method in each
    }


@pytest.mark.usefixtures("lasting_connection")
@pytest.mark.parametrize("operation", [pytest.param(each, id=each.label) for each in OPERATIONS])
def test_an_answer_is_as_described_whatever_comes_in(operation: Any, settings: Any) -> None:
    settings.LLMGW_OFFLINE = True
    replica = a_replica(a_model(profiles=[PROFILE | {"env": {"A": "1"}}]), a_node())
    api = Api(alice())
    headers = {"Authorization": f"Bearer {api.text}"}
    of = operation.path.split("/")[2]
    there = {
        "models": "tiny",
        "nodes": "gpu-01",
        "keys": api.key.pk,
        "replicas": str(replica.pk),
        "events": "1",
    }
    known = {"name": there.get(of), "id": there.get(of), "profile": "default"}

    @bounded(
        max_examples=EXAMPLES,
        derandomize=not IS_SOAK,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)),
        is_there=st.booleans(),
    )
    def judge(case: Any, is_there: bool) -> None:
        case.cookies = {}  # a session beside the key would be all that is looked at
        if is_there:
            case.path_parameters |= {name: known[name] for name in case.path_parameters}
        if is_there and of == "models" and isinstance(case.body, dict):  # a sound one but for one field
            case.body = model_form("other") | dict([*case.body.items()][:1])
        case.validate_response(case.call(headers=headers), checks=CHECKS)

    judge()


BODIES: list[Any] = [None, True, -1.5, 2**70, "text", "\ud800\0", [], [{"b": None}], {"": {}}]
WRITES = [
    ("POST", "models", "ModelRequest"),
    ("PUT", "models/tiny", "ReplacingModelRequest"),
    ("PATCH", "models/tiny", "ModelPatchRequest"),
    ("POST", "models/tiny/check", "CheckRequest"),
    ("POST", "keys", "NewKeyRequest"),
    ("POST", "models/tiny/roll", "RollingRequest"),
    ("POST", "models/tiny/bench", "BenchRequest"),
    ("POST", "nodes/gpu-01/cordon", "ReasonRequest"),
    ("POST", "nodes/gpu-01/drain", "ReasonRequest"),
    ("POST", "reconciler/pause", "ReasonRequest"),
]


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("method", "path", "shape"), [pytest.param(*each, id=" ".join(each[:2])) for each in WRITES]
)
def test_a_body_of_any_type_in_any_place_is_judged(method: str, path: str, shape: str) -> None:
    a_replica(a_model(), a_node())
    api = Api(alice())
    told = schema()["components"]["schemas"]
    fields = told[shape]["properties"]
    bodies = [*BODIES, *({field: body} for field in fields for body in BODIES)]
    if method == "POST" and "profiles" in fields:  # a profile is read alike whatever becomes of it
        inside = told["ProfileRequest"]["properties"]
        bodies += [{"profiles": [{field: body}]} for field in inside for body in BODIES]
    for body in bodies:
        status, answer = api(method, path, json.dumps(body))
        assert status < 500, body
        assert status < 400 or answer["errors"][0]["sentence"], body
    assert Replica.objects.count() == 1
