"""Example programs for the packages cudagraph, sampling, grammar and models.

Run an example with ``python -m graft.tools.examples.NAME``.
"""
