"""What people are told of: kinds of trouble, what is posted of one and how it is signed, when it is tried
again, and where it may be posted to.

A receiver knows a notice by its `id` (it may come twice, and after a later one), and that it is ours by its
signature: the header `LLMGW-Signature: t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256, keyed with the
webhook's secret, of SECONDS, a dot and the body as it came. A receiver refuses one whose SECONDS are long
ago.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

from catalog.reading import quote

SIGNATURE_HEADER = "LLMGW-Signature"
ID_HEADER = "LLMGW-Notice"
BEGINS, OVER, TEST = "begins", "over", "test"
SECRET_START = "whsec_"  # noqa: S105

FIRST, LONGEST = timedelta(seconds=10), timedelta(minutes=10)
URL_LIMIT = 2000
NAME_LIMIT = 100

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of trouble. borne: for how long it is nobody's business yet."""

    says: str
    borne: timedelta = timedelta()


NODE_LOST = "node_lost"
CRASH_LOOP = "crash_loop"
UNPLACED = "unplaced"
STALE = "stale"
ROLL_HALTED = "roll_halted"
DISK_LOW = "disk_low"
KEY_EXPIRING = "key_expiring"
ENGINE_CHECK = "engine_check_failed"
PAUSED = "reconciler_paused"
ALARM = "reconciler_alarm"
SILENT = "reconciler_silent"
OUTRANKED = "reconciler_outranked"

KINDS: Mapping[str, Kind] = {
    NODE_LOST: Kind("a node's agent does not answer any more"),
    CRASH_LOOP: Kind("a profile keeps failing"),
    UNPLACED: Kind("a wanted replica has no place", timedelta(minutes=2)),
    STALE: Kind("what runs is not what the catalog says", timedelta(hours=1)),
    ROLL_HALTED: Kind("a roll has stopped halfway"),
    DISK_LOW: Kind("the disk for weights on a node is nearly full", timedelta(minutes=5)),
    KEY_EXPIRING: Kind("an API key expires within a week"),
    ENGINE_CHECK: Kind("the last engine check of a model found what it claims and cannot do"),
    PAUSED: Kind("somebody has paused the reconciler", timedelta(minutes=15)),
    ALARM: Kind("the reconciler does not act on what it sees"),
    SILENT: Kind("no pass is made", timedelta(minutes=1)),
    OUTRANKED: Kind("agents obey another control plane than this one"),
}

TEST_KIND = "test"


# --- what is posted -------------------------------------------------------------------------------


def signature(secret: str, sent_at_s: int, body: bytes) -> str:
    """The value of SIGNATURE_HEADER."""
    text = f"{sent_at_s}.".encode() + body
    return f"t={sent_at_s},v1={hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()}"


def secret_of(webhook: str, key: bytes) -> str:
    """What a webhook's notices are signed with: it derives from a key that is kept elsewhere."""
    return SECRET_START + hmac.new(key, f"webhook {webhook}".encode(), hashlib.sha256).hexdigest()


def wait_after(failures: int) -> timedelta:
    """How long a webhook is left alone after so many failures in a row."""
    doublings = max(0, min(failures - 1, 16))
    return min(FIRST * (1 << doublings), LONGEST)


# --- where to -------------------------------------------------------------------------------------


def fault_of_url(url: str) -> str:
    """Why nothing can be posted there, whatever its address turns out to be; empty where it can."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return f"url {quote(url)} cannot be read; write it as https://host/path"
    if len(url) > URL_LIMIT or not url.isascii() or not url.isprintable() or " " in url:
        return f"url must be at most {URL_LIMIT} visible ASCII characters; percent-encode the others"
    if parts.scheme not in ("https", "http") or not host:
        return f"url {quote(url)} must begin with https:// and a host"
    if parts.username is not None or parts.password is not None:
        return "url must hold no user and no password; what its receiver needs to know may be in its path"
    if parts.fragment:
        return "url must have no fragment (#...), as no server is told of it; leave it out"
    return ""


def host_words(url: str) -> str:
    """What of it anybody may see: its path may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" + ("/..." if parts.path.strip("/") or parts.query else "")


def fault_of_address(address: str, scheme: str, allowed: Collection[IpNetwork]) -> str:
    """Why nothing is posted to this address, as a phrase; empty where it is. Every address is judged that a
    host's name stands for."""
    try:
        found = _plain(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return f"{address[:80]} is no address"
    if any(found.version == network.version and found in network for network in allowed):
        return ""
    if not found.is_global or found.is_multicast:
        return f"{found} is a private address, and LLMGW_WEBHOOK_NETWORKS does not allow it"
    if scheme != "https":
        return f"{found} is reached by plain HTTP, which only LLMGW_WEBHOOK_NETWORKS may allow; use https"
    return ""


def fault_of_host(url: str, allowed: Collection[IpNetwork]) -> str:
    """As `fault_of_address`, of a host that is written as one; a name is judged when it is looked up."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        is_local = host == "localhost" or host.endswith(".localhost")
        return fault_of_address("127.0.0.1", parts.scheme, allowed) if is_local else ""
    return fault_of_address(host, parts.scheme, allowed)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _plain(address: IpAddress) -> IpAddress:
    """The IPv4 address that one of IPv6 leads to, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address.sixtofour:
            return address.sixtofour
        if address.teredo:
            return address.teredo[1]
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
