"""Compares the statuses of a fixed set of schemas with those in ``schema_statuses.txt``.

The set consists of the draft-7 JSON-Schema-Test-Suite, and of the schemas of MaskBench for which
the first byte of the SHA-1 digest of the id is less than 8 (about one in 32). A line of the file
has the id of a schema and its statuses by default, with ``strict=True`` and with
``key_order="any"``; a plus sign says that the schema has an automaton.
`graft.tools.bench.grammar` defines the statuses.

After an intended change, this command writes the file anew:

    GRAFT_TEST_DATA=../shared/data python tests/grammar/test_schema_statuses.py
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from graft.tools.bench.grammar_child import Graft, encode_bytes, evaluate_schema
from graft.tools.bench.grammar_data import byte_vocabulary, read_schemas

STATUSES = Path(__file__).parent / "schema_statuses.txt"
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"strict": True}, {"key_order": "any"})
#: The default run tests every schema whose index is a multiple of this number.
SAMPLE_STEP = 40


@functools.cache
def subjects() -> list[Graft]:
    """Return one subject of the benchmark for each of `OPTIONS`, with tokens of one byte."""
    return [Graft(byte_vocabulary(), **options) for options in OPTIONS]


def rows_of(data: Path) -> list[dict[str, Any]]:
    """Return the rows of the set."""
    rows = [
        row
        for row in read_schemas(data / "maskbench")
        if hashlib.sha1(row["id"].encode()).digest()[0] < 8
    ]
    return rows + read_schemas(data / "json-schema-test-suite" / "draft7.jsonl.gz")


def line_of(row: dict[str, Any]) -> str:
    """Return the line of a row in the file."""
    words = [row["id"]]
    for subject in subjects():
        answer = evaluate_schema(subject, row, encode_bytes, list(range(256)), timed=False)
        words.append(answer["status"] + "+" * (answer["table_bytes"] is not None))
    return " ".join(words)


@pytest.mark.parametrize("step", [SAMPLE_STEP, pytest.param(1, marks=pytest.mark.full)])
def test_schema_statuses_have_not_changed(shared_data, step):
    expected = dict(line.split(" ", 1) for line in STATUSES.read_text().splitlines())
    rows = rows_of(shared_data)
    assert [row["id"] for row in rows] == list(expected)
    changed = [
        (expected[row["id"]], found)
        for row in rows[::step]
        if (found := line_of(row)) != f"{row['id']} {expected[row['id']]}"
    ]
    assert changed == []


if __name__ == "__main__":
    sys.setrecursionlimit(20_000)
    folder = Path(os.environ["GRAFT_TEST_DATA"])
    STATUSES.write_text("".join(line_of(row) + "\n" for row in rows_of(folder)))
