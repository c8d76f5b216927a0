"""Latency of host work in a replayed graph, by transport."""
