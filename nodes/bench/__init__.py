"""Decides what a bench asks, how hard, and what follows from what came back. Asks and measures nothing."""

from nodes.bench.asks import DISTRIBUTIONS
from nodes.bench.options import GATEWAY, Options

__all__ = ["DISTRIBUTIONS", "GATEWAY", "Options"]
