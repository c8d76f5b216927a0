"""Tests of the grammar benchmark (graft.tools.bench.grammar)."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from graft.cudagraph.errors import OptionError
from graft.tools.bench import grammar, grammar_data

pytest.importorskip("llguidance")

ROWS: list[dict[str, Any]] = [
    {
        "id": "plain",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "valid": [{"a": 1}],
        "invalid": [{"a": "x"}, {}],
    },
    # U+2028 is a line break for str.splitlines, but not in JSON.
    {"id": "line\u2028", "schema": {"enum": ["a\u2028b"]}, "valid": ["a\u2028b"], "invalid": [1]},
    {
        "id": "order",
        "schema": {"type": "object", "properties": {"a": {}, "b": {}}},
        "valid": [{"b": 1, "a": 3}],
        "invalid": [3],
    },
    {
        "id": "partial",
        "schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "valid": [["x", "y"]],
        "invalid": [["x", "x"]],
    },
    {
        "id": "unsatisfiable",
        "schema": {"allOf": [{"type": "string"}, {"type": "null"}]},
        "valid": [],
        "invalid": ["x"],
    },
    {"id": "no instances", "schema": True, "valid": [], "invalid": []},
]


def byte_tokenizer(*special: str) -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens are single bytes and the given special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the schemas of `ROWS` and a tokenizer file."""
    path = tmp_path_factory.mktemp("bench")
    byte_tokenizer("<|end|>", "<|last|>").save(str(path / "tokenizer.json"))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return path


def test_grammar_bench_reports_verdicts_as_table_and_json(folder, tmp_path, capsys):
    report = tmp_path / "out.json"
    arguments = [str(folder), "--tokenizer", str(folder / "tokenizer.json")]
    arguments += ["--subjects", "llguidance", "auto", "--key-order", "any", "--json", str(report)]
    assert grammar.main(arguments) == 0
    results = json.loads(report.read_text())
    assert results["schemas"] == 5
    auto = results["subjects"]["auto"]
    verdicts = ("correct", "flagged", "refused", "overconstrained", "underconstrained")
    assert [auto[verdict] for verdict in verdicts] == [3, 1, 1, 0, 0]
    assert auto["invalid_accepted"] == 0
    assert auto["invalid"] == 4
    assert auto["fills"] >= len('{"a": 1}')
    assert auto["fill_us"]["max"] >= auto["fill_us"]["p50"]
    llguidance = results["subjects"]["llguidance"]
    assert [llguidance[name] for name in ("correct", "overconstrained", "refused")] == [2, 1, 2]
    assert {row["id"]: row["verdict"] for row in results["incorrect"]} == {
        "partial": "flagged",
        "unsatisfiable": "refused",
    }
    assert "auto" in capsys.readouterr().out


def test_grammar_bench_timeout_affects_one_schema(folder):
    """A child process that exceeds the time limit is killed and restarted for the next schema."""
    subject = grammar.Subject("llguidance", folder / "tokenizer.json")
    slow = {"schema": {"type": "string"}, "valid": ["x" * 2_000_000], "invalid": []}
    try:
        assert subject.evaluate(slow, 0.01)["outcome"] == "timeout"
        assert grammar.verdict(subject.evaluate({**ROWS[0]}, 60)) == "correct"
    finally:
        subject.close()


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "overconstrained"),
        ({"declared": 1}, "flagged"),
        ({"valid": [True]}, "correct"),
        ({"valid": [False] * 2, "declared": 1}, "overconstrained"),
        ({"invalid": [True]}, "underconstrained"),
        ({"invalid": [True], "declared": 1}, "underconstrained"),
        ({"outcome": "crash"}, "crash"),
        ({"invalid": [True], "partial": True}, "flagged"),
    ],
)
def test_grammar_bench_verdict(change, verdict):
    answer = {"outcome": "compiled", "partial": False, "valid": [True, False], "invalid": [False]}
    assert grammar.verdict(answer | change) == verdict


def test_grammar_bench_quantiles():
    values = np.arange(1, 1002, dtype=float)
    assert grammar.quantiles(values) == {"p50": 501.0, "p99": 991.0, "p99.9": 1000.0, "max": 1001.0}
    assert grammar.summary([])["correct_percent"] == 0


@pytest.mark.parametrize(
    ("special", "stop_token", "expected"),
    [
        (("<s>", "</s>", "<pad>"), None, "</s>"),
        (("<|begin_of_text|>", "<|eot_id|>", "<|python|>"), None, "<|eot_id|>"),
        (("<eos>", "<pad>"), None, "<eos>"),
        (
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁thinking｜>"),
            None,
            "<｜end▁of▁sentence｜>",
        ),
        (("<a>", "<b>"), "<a>", "<a>"),
    ],
)
def test_load_tokenizer_finds_end_token(tmp_path, special, stop_token, expected):
    byte_tokenizer(*special).save(str(tmp_path / "t.json"))
    tokenizer, vocabulary = grammar_data.load_tokenizer(tmp_path / "t.json", stop_token)
    assert vocabulary.stop_ids == (tokenizer.token_to_id(expected),)


@pytest.mark.parametrize(
    ("special", "stop_token", "message"),
    [(("<a>", "<b>"), None, "<a>, <b>: specify one"), (("<a>",), "<c>", "no token '<c>'")],
)
def test_load_tokenizer_rejects_missing_end_token(tmp_path, special, stop_token, message):
    byte_tokenizer(*special).save(str(tmp_path / "t.json"))
    with pytest.raises(OptionError, match=re.escape(message)):
        grammar_data.load_tokenizer(tmp_path / "t.json", stop_token)


def test_read_schemas_skips_rows_without_instances_before_counting(tmp_path):
    rows = [{"id": i, "schema": True, "valid": [1] * (i % 2), "invalid": []} for i in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [row["id"] for row in grammar_data.read_schemas(tmp_path, 2)] == [1, 5, 9]
