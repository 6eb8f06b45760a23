"""What an engine check asks a running engine, what it makes of the answers, and the words for that.

Pure: requests and answers are values. `nodes/interview.py` carries them to an engine and back.
"""

from nodes.checks.answers import Call, Reply, read_reply, read_stream
from nodes.checks.claims import CAPABILITIES, Claims, claims_of
from nodes.checks.findings import CHECKS, Badge, Finding, Verdict, Verified, badges, is_claimed, verdict_of

__all__ = [
    "CAPABILITIES",
    "CHECKS",
    "Badge",
    "Call",
    "Claims",
    "Finding",
    "Reply",
    "Verdict",
    "Verified",
    "badges",
    "claims_of",
    "is_claimed",
    "read_reply",
    "read_stream",
    "verdict_of",
]
