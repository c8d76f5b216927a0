"""Measure the latency of host work in a replayed graph, by transport."""
