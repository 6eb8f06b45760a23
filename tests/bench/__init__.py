"""Measurements, run by hand: `python -m tests.bench.NAME`, with --json for scripts. The suite tests that they
run, and pins what does not depend on the machine."""
