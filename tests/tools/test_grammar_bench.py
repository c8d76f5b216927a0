"""Tests of the grammar benchmark (graft.tools.bench.grammar)."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from graft.cudagraph.errors import OptionError
from graft.tools.bench import grammar, grammar_child, grammar_data

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
        "schema": {"type": "string", "not": {"format": "email"}},
        "valid": ["x"],
        "invalid": ["a@b.cd"],
    },
    {
        "id": "unsatisfiable",
        "schema": {"allOf": [{"type": "string"}, {"type": "null"}]},
        "valid": [],
        "invalid": ["x"],
    },
    {"id": "no instances", "schema": True, "valid": [], "invalid": []},
    {
        "id": "leap second",
        "schema": {"type": "string", "format": "time"},
        "valid": ["23:59:60Z"],
        "invalid": [],
    },
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


def test_grammar_bench_reports_times_and_statuses(folder, tmp_path, capsys):
    report = tmp_path / "out.json"
    arguments = [str(folder), "--tokenizer", str(folder / "tokenizer.json")]
    arguments += ["--subjects", "llguidance", "graft", "--json", str(report)]
    assert grammar.main(arguments) == 0
    results = json.loads(report.read_text())
    graft = results["statuses"]["graft"]
    assert [graft[status] for status in grammar.STATUSES] == [3, 1, 2, 0, 0, 0, 0]
    assert graft["reordered"] == 1
    llguidance = results["statuses"]["llguidance"]
    assert [llguidance[status] for status in ("right", "refused", "wrong")] == [4, 2, 0]
    for found in results["times"]["with an automaton"].values():
        assert found["schemas"] == 4
        assert found["later_us"].keys() == {"mean", "p50", "p99"}
        assert found["compile_ms"]["p50"] > 0
    assert "with an automaton" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        pytest.param(
            (),
            ["right"] * 3 + ["refused", "refused", "untested", "narrowed"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--strict",),
            ["right"] * 3 + ["refused", "refused", "untested", "narrowed"],
            marks=pytest.mark.full,
        ),
        (("--key-order", "any"), ["right"] * 3 + ["refused", "refused", "untested", "narrowed"]),
    ],
)
def test_grammar_bench_writes_status_of_each_schema(folder, tmp_path, options, statuses):
    file = tmp_path / "statuses.jsonl"
    assert grammar.main([str(folder), "--statuses", str(file), *options]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["id"] for line in lines] == [row["id"] for row in ROWS]
    assert [line["status"] for line in lines] == statuses
    assert "#: not: " in lines[3]["cause"]
    assert lines[1]["table_bytes"] > 0
    assert lines[2]["reordered"] == (options != ("--key-order", "any"))


@pytest.mark.parametrize(
    ("valid", "invalid", "status", "cause"),
    [
        ([{"a": 1.0}], [{"a": 0.5}], "right", ""),
        ([{"a": 1}], [{"a": 2}], "wrong", "accepts invalid[0]"),
        ([{"a": 1}, {"a": "x"}], [], "right", ""),  # jsonschema contradicts the label
        ([{"a": 1, "b": 1}], [], "right", ""),  # strict=True excludes the value
    ],
)
def test_grammar_bench_status_follows_from_instances(valid, invalid, status, cause):
    row = ROWS[0] | {"valid": valid, "invalid": invalid}
    graft = grammar_child.Graft(grammar_data.byte_vocabulary(), strict=True)
    answer = grammar_child.evaluate_schema(
        graft, row, grammar_child.encode_bytes, list(range(256)), False
    )
    assert (answer["status"], answer["cause"]) == (status, cause)


def test_grammar_bench_skips_missing_packages(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert grammar._usable_subjects(["xgrammar", "graft"]) == ["graft"]
    assert capsys.readouterr().err == "xgrammar is not installed: skipped\n"


def test_grammar_bench_timeout_affects_one_schema(folder):
    """A child process that exceeds the time limit is killed and restarted for the next schema."""
    subject = grammar.Subject("llguidance", folder / "tokenizer.json")
    slow = {"schema": {"type": "string"}, "valid": ["x" * 2_000_000], "invalid": []}
    try:
        assert subject.evaluate(slow, 0.01)["status"] == "time"
        assert subject.evaluate({**ROWS[0]}, 60)["status"] == "right"
    finally:
        subject.close()


def test_grammar_bench_statistics():
    values = list(range(1, 1002))
    assert grammar.statistics(values) == {"mean": 501.0, "p50": 501.0, "p99": 991.0}
    assert grammar.statistics([]) == {}


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


def test_read_schemas_declares_draft_of_test_suite(tmp_path):
    (tmp_path / "draft7.jsonl").write_text('{"schema": {"type": "null"}}\n\n{"schema": true}\n')
    (tmp_path / "rows.jsonl").write_text('{"schema": {}}\n')
    schemas = [row["schema"] for row in grammar_data.read_schemas(tmp_path)]
    declared = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "null"}
    assert schemas == [declared, True, {}]
    assert len(grammar_data.read_schemas(tmp_path / "rows.jsonl")) == 1
