"""Decides what a bench asks, how hard, and what follows from what came back. Asks and measures nothing."""
