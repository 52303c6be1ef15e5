"""Measurements behind the project's claims: `python -m tests.benchmarks.NAME [--check]`, summary on the last line."""
