"""By which certificate an engine is known: the very one that it was started with, as its node's agent tells.

Engines run for months and show what they read when they started. So no authority vouches for them and neither
name nor date is looked at: who has the key of this one certificate is the engine, and nobody else is. Where
its files were renewed before an engine read them, its agent sees so, and tells of the newer one. The agent's
word travels by its own door, which is known by whatever its node joined with.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import re
import ssl

_CHECKSUM = re.compile("[0-9a-f]{64}")
_FIRST = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def is_checksum(text: str) -> bool:
    """Whether it is the SHA-256 of one, in hex."""
    return _CHECKSUM.fullmatch(text) is not None


def checksum_of(pem: str) -> str:
    """Of the one that a TLS client is shown, which is the first of a chain. Raises ValueError where there is
    none."""
    found = _FIRST.search(pem)
    if found is None:
        raise ValueError("it holds no PEM certificate")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).hexdigest()


@functools.cache
def unproven() -> ssl.SSLContext:
    """For a connection over which nothing is said before `is_shown` has been asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_shown(transport: asyncio.BaseTransport, certificate: str) -> bool:
    """Whether the other end has the key of the certificate with this checksum."""
    over_tls = transport.get_extra_info("ssl_object")
    shown = over_tls.getpeercert(binary_form=True) if over_tls is not None else None
    return shown is not None and hmac.compare_digest(
        hashlib.sha256(shown).hexdigest().encode(), certificate.encode()
    )
