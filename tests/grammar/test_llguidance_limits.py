"""LLGuidance's limits as graft sets them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from graft.grammar import GrammarSpec, LLGuidanceBackend, Vocabulary

pytest.importorskip("llguidance")

#: A pattern under a long length bound: LLGuidance's own limits end in the middle of its texts.
SCHEMA = {"type": "string", "minLength": 1, "maxLength": 2000,
          "pattern": "^$|(^(?:\\S+\\s+){0,60}\\S+$)"}  # fmt: skip


def test_a_pattern_under_a_long_bound_goes_through():
    """Such a text is accepted to its end, with a mask before each token."""
    vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b""], 257, [256])
    backend = LLGuidanceBackend(vocabulary)
    spec = GrammarSpec.json_schema(SCHEMA, backend="auto")
    matcher = backend.matcher(backend.compile(spec))
    row = np.zeros(vocabulary.words, np.int32)
    for byte in json.dumps("what is it").encode():
        matcher.fill(row)
        assert row[byte >> 5] >> (byte & 31) & 1
        assert matcher.accept(byte)
    assert matcher.accept(256) and matcher.is_terminated()
