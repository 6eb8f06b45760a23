"""What the nodes' agents are told of weights: who else has them, to fetch some ahead of time, to remove some.
Callers are threads without an event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from nodes.conversation import AgentProblem, Session, ask, ask_each, cluster_keys, refusal
from nodes.models import Node
from nodes.protocol import CLUSTER_HEADER, Launch, Peer, WeightsOrder, to_json
from nodes.sharing import key_of
from nodes.tickets import TICKET_S, sign


class Declined(AgentProblem):
    """An agent has answered, and will not."""


def peers_for(
    reader: Node, launch: Launch, holders: Sequence[tuple[Node, bool]], *, now: datetime
) -> tuple[Peer, ...]:
    """With a ticket each, by the database's clock. holders: those who have its weights, and whether they are
    yet to get them."""
    key = key_of(launch)
    until_s = int(now.timestamp()) + TICKET_S
    return tuple(
        Peer(
            url=node.address.rstrip("/"),
            # While a cluster key is rotated, an agent may still hold the token that the older one minted.
            ticket=sign(
                [each.node_token(str(node.uuid), node.token_generation) for each in cluster_keys()],
                key=key,
                reader=str(reader.uuid),
                until_s=until_s,
            ),
            certificate=node.certificate,
            is_fetching=is_fetching,
        )
        for node, is_fetching in holders
        if key
    )


def order_weights(node: Node, order: WeightsOrder) -> None:
    """Raises AgentProblem or, of these, Declined."""
    _tell(node, "POST", "/v1/weights", body=to_json(order))


def remove_weights(node: Node, key: str, *, cluster: str) -> None:
    """Raises AgentProblem or, of these, Declined where they are in use."""
    _tell(node, "DELETE", f"/v1/weights/{key}", headers={CLUSTER_HEADER: cluster})


def _tell(node: Node, method: str, path: str, **given: Any) -> None:
    async def told(session: Session, node: Node) -> None:
        answer = await ask(session, node, method, path, **given)
        if answer.status >= 300:
            raise Declined(refusal(node, answer))

    ask_each(told, [node])
