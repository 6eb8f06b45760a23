"""The cast of the doors' tests: people, models, nodes and replicas, as the verbs and the loop leave them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import Permission, User
from django.db.models.functions import Now

from catalog.actions import add_model, edit_model
from catalog.models import Model
from catalog.source import PathFacts
from catalog.spec import ModelSpec
from nodes.models import Claim, Node, Rank, Replica

PROFILE: dict[str, Any] = {"name": "default", "engine": "sim", "gpu_class": "sim"}


def nobody_is_asked(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    raise AssertionError(f"the nodes were asked about {path}")


def alice() -> User:
    """She may do everything."""
    return User.objects.create_superuser("alice")


def viola() -> User:
    """She is staff, and may look."""
    viola = User.objects.create_user("viola", is_staff=True)
    viola.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    return viola


def model_form(name: str = "tiny", **fields: Any) -> dict[str, Any]:
    """A model on the sim engine, as JSON: nobody need be asked about its source."""
    return {
        "name": name,
        "source": "sim/tiny",
        "profiles": [PROFILE],
        "scaling": {"min": 1, "max": 2},
    } | fields


def a_model(name: str = "tiny", **fields: Any) -> Model:
    form = model_form(name, **fields)
    common: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}
    return add_model(form, by="alice", door="command", **common).model


def edited(model: Model, **profile: Any) -> None:
    """The model's only profile, changed as an operator would."""
    form = model_form(model.name, profiles=[PROFILE | profile])
    edit_model(model.name, form, by="alice", door="command", ask_paths=nobody_is_asked, after_change=int)


def a_node(name: str = "gpu-01", gpus: int = 2, **fields: Any) -> Node:
    """A node that has just been heard from."""
    report = {
        "cluster": "c",
        "node": "n",
        "agent_version": "0.1.0",
        "engines": [{"name": "sim", "version": "1"}],
        "labels": {"zone": "a"},
        "gpus": [
            {
                "id": f"{name}-gpu-{index}",
                "index": index,
                "gpu_class": "sim",
                "name": "Sim",
                "memory_mib": 81920,
            }
            for index in range(gpus)
        ],
    }
    node = Node.objects.create(name=name, **{"address": f"http://{name}:8378", "report": report} | fields)
    if "seen_at" not in fields:
        Node.objects.filter(pk=node.pk).update(seen_at=Now())
    return node


def a_replica(model: Model, node: Node, state: str = "ready", gpu: int | None = 0, **fields: Any) -> Replica:
    """A replica of the model's first profile, as it is in the catalog at this moment."""
    spec = model.spec
    profile = model.profiles.all()[0]
    launch = {
        "model": spec.name,
        "source": spec.source,
        "profile": spec.profiles[0].as_dict(),
        "fingerprint": profile.fingerprint,
        "context_length": spec.context_length,
        "capabilities": spec.as_dict()["capabilities"],
    }
    replica = Replica.objects.create(
        model=model,
        profile=profile,
        state=state,
        **{"launch": launch, "fingerprint": profile.fingerprint} | fields,
    )
    Replica.objects.filter(pk=replica.pk).update(state_since=Now() - timedelta(minutes=5))
    rank = Rank.objects.create(
        replica=replica, node=node, state=state, port=18001, pid=4242, command=["sim", "--port", "18001"]
    )
    if gpu is not None:
        Claim.objects.create(rank=rank, node=node, gpu=f"{node.name}-gpu-{gpu}")
    return replica
