"""Benchmarks of the runtime: each starts its own ranks by `horovodrun` and prints a table."""
