"""Example programs for cudagraph, sampling, grammar and models.

Run one with ``python -m graft.tools.examples.NAME``.
"""
