"""Where a replica's engine listens, with which key it is asked, and what it is: for those who ask it
themselves, past the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from nodes.agents import last_report
from nodes.conversation import cluster_keys
from nodes.models import Rank, Replica
from nodes.protocol import ClusterKey, Launch
from nodes.stale import launch_from


@dataclass(frozen=True, slots=True)
class Origin:
    """url: of the engine itself; certificate: the checksum of the one it must show, empty where it has none.
    version: as its node tells; empty is unknown. gpu: such as "2 h100", empty on a processor. context_length:
    by the engine's own word, 0 where it has not told."""

    replica: str
    url: str
    key: str
    launch: Launch
    certificate: str = ""
    version: str = ""
    gpu: str = ""
    context_length: int = 0


def origin_of(replica: Replica) -> Origin | None:
    """Of its first rank; None while that has no port."""
    rank = Rank.objects.select_related("node").filter(replica=replica, rank=0, port__isnull=False).first()
    if rank is None or rank.port is None:
        return None
    launch = launch_from(replica.launch)
    report = last_report(rank.node)
    engines = {each.name: each.version for each in report.engines} if report else {}
    classes = {each.id: each.gpu_class or each.name for each in report.gpus} if report else {}
    held = [claim.gpu for claim in rank.claims.all()]
    gpu = next((classes[each] for each in held if classes.get(each)), "GPU")
    pk = str(replica.pk)
    return Origin(
        replica=pk,
        url=engine_url(rank.node.address, rank.port, rank.certificate),
        certificate=rank.certificate,
        key=ClusterKey.chosen(cluster_keys(), replica.key_id).replica_key(pk, replica.generation),
        launch=launch,
        version=engines.get(launch.engine) or "",
        gpu=f"{len(held)} {gpu}" if held else "",
        context_length=rank.context_length or 0,
    )


def engine_url(address: str, port: int, certificate: str) -> str:
    """Engines listen on the host that their agent listens on, and speak TLS where they have a certificate."""
    scheme, host = "https" if certificate else "http", urlsplit(address).hostname or ""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
