"""Real schemas: what a grammar enforces agrees with the schema's own instances."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from guide_util import BYTES, accepts

from graft.grammar import GrammarError, GrammarSpec

SPLITS = ("BFCL", "Github_easy", "Github_medium", "Glaiveai2K", "JME")
PER_SPLIT = 25


def test_accepted_schemas_let_no_invalid_instance_through(shared_data: Path, serve):
    """Of real schemas that are not refused, every invalid instance is kept out, most valid ones
    fit (fixed property order and no undeclared properties keep some out)."""
    folder = shared_data / "maskbench"
    if not folder.is_dir():
        pytest.skip(f"no schemas at {folder}")
    service = serve(vocabulary=BYTES, timeout_s=5)  # what takes longer counts as refused
    compiled = refused = 0
    outcome = {True: [0, 0], False: [0, 0]}  # valid: [refused, accepted]
    for split in SPLITS:
        with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        for row in rows[:: max(1, len(rows) // PER_SPLIT)]:
            try:
                grammar = service.submit(GrammarSpec.json_schema(row["schema"])).result()
            except GrammarError:
                refused += 1
                continue
            compiled += 1
            for valid in (True, False):
                for instance in row["valid" if valid else "invalid"]:
                    fits = accepts(grammar, json.dumps(instance, ensure_ascii=False))
                    outcome[valid][fits] += 1
                    assert valid or not fits, (row["id"], instance)
    assert compiled > 80 and compiled > refused
    assert sum(outcome[False]) > 100
    assert outcome[True][True] > 0.85 * sum(outcome[True])
