"""How many tokens a prompt may have, told from its size alone, and whether that fits a model's context.

A tokenizer is asked only where size cannot tell: no token of a byte-level vocabulary is empty, and the
longest that common vocabularies hold are runs of 128 spaces. What a chat template adds is allowed for.
"""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_TOKEN_MOST = 128
BYTES_PER_TOKEN_DENSE = 3
"""Few texts have more tokens than one for so many bytes: below that an engine's tokenizer is not asked, and
the engine itself refuses the rare one that does not fit."""
TEMPLATE_TOKENS = 1024
"""What a chat template may put around messages: names of roles, a preamble, how to call tools."""

FITS, UNSURE, EXCEEDS = "fits", "unsure", "exceeds"


class Span(NamedTuple):
    """Between how many tokens a prompt has. `most` is None where its size says nothing, as of an image."""

    least: int = 0
    most: int | None = 0

    @classmethod
    def of_bytes(cls, size: int) -> Span:
        """Of one prompt that is written in so many bytes of JSON."""
        # One is made for each request, and a named tuple's own constructor costs three times as much.
        return tuple.__new__(cls, (size // BYTES_PER_TOKEN_MOST, size + TEMPLATE_TOKENS))

    @classmethod
    def counted(cls, tokens: int) -> Span:
        return cls(tokens, tokens)

    @property
    def likely_most(self) -> int | None:
        return None if self.most is None else max(self.least, self.most // BYTES_PER_TOKEN_DENSE)


UNKNOWN = Span(0, None)


def judge(prompt: Span, output_tokens: int, context_length: int) -> str:
    """`UNSURE` where only a tokenizer can tell. Without a known context everything fits."""
    if not context_length:
        return FITS
    if prompt.least + output_tokens > context_length:
        return EXCEEDS
    if prompt.most is None or prompt.most + output_tokens <= context_length:
        return FITS
    likely = prompt.likely_most
    return FITS if likely is not None and likely + output_tokens <= context_length else UNSURE
