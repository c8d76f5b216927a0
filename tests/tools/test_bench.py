"""The benchmarks count what they say they count, and survive what they measure."""

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
from graft.tools.bench import data, grammar, prefix
from graft.tools.demo_model import demo_model

pytest.importorskip("llguidance")

ROWS: list[dict[str, Any]] = [
    {
        "id": "plain",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "valid": [{"a": 1}],
        "invalid": [{"a": "x"}, {}],
    },
    # Python also ends a line at U+2028; JSON does not.
    {"id": "line\u2028", "schema": {"enum": ["a\u2028b"]}, "valid": ["a\u2028b"], "invalid": [1]},
    {
        "id": "order",
        "schema": {"type": "object", "properties": {"a": {}, "b": {}}},
        "valid": [{"b": 1, "a": 3}],
        "invalid": [3],
    },
    {
        "id": "loose",
        "schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "valid": [["x", "y"]],
        "invalid": [["x", "x"]],
    },
    {
        "id": "nothing",
        "schema": {"allOf": [{"type": "string"}, {"type": "null"}]},
        "valid": [],
        "invalid": ["x"],
    },
    {"id": "no instances", "schema": True, "valid": [], "invalid": []},
]


def byte_tokenizer(*special: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of single bytes with special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows, and a tokenizer beside them."""
    path = tmp_path_factory.mktemp("bench")
    byte_tokenizer("<|end|>", "<|last|>").save(str(path / "tokenizer.json"))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return path


def test_verdicts_reach_table_and_json(folder, tmp_path, capsys):
    """Verdicts by subject are right; a row may hold any character; no instances do not count."""
    report = tmp_path / "out.json"
    assert (
        grammar.main(
            [
                str(folder),
                "--tokenizer",
                str(folder / "tokenizer.json"),
                "--subjects",
                "llguidance",
                "auto",
                "--json",
                str(report),
                "--key-order",
                "any",
            ]
        )
        == 0
    )
    found = json.loads(report.read_text())
    auto = found["subjects"]["auto"]
    stock = found["subjects"]["llguidance"]
    assert found["schemas"] == 5
    assert [auto[k] for k in ("right", "marked", "refused", "missed", "wrong")] == [3, 1, 1, 0, 0]
    assert [stock[k] for k in ("right", "missed", "refused")] == [2, 1, 2]
    assert auto["invalid_accepted"] == 0 and auto["invalid"] == 4
    assert auto["fills"] >= len('{"a": 1}') and auto["fill_us"]["max"] >= auto["fill_us"]["p50"]
    assert {row["id"]: row["verdict"] for row in found["not_right"]} == {
        "loose": "marked",
        "nothing": "refused",
    }
    assert "auto" in capsys.readouterr().out


def test_a_runaway_costs_one_row(folder):
    """A child that takes too long is killed and named; the next row gets a new one."""
    subject = grammar.Subject("llguidance", folder / "tokenizer.json")
    endless = {"schema": {"type": "string"}, "valid": ["x" * 2_000_000], "invalid": []}
    try:
        assert subject.ask(endless, 0.01)["outcome"] == "timeout"
        assert grammar.verdict(subject.ask({**ROWS[0]}, 60)) == "right"
    finally:
        subject.close()


def test_verdicts_put_leaks_before_everything_but_marks():
    """Leaks are wrong unless the schema was marked; misses are missed unless told of."""
    answer = {"outcome": "compiled", "marked": False, "valid": [True, False], "invalid": [False]}
    for change, said in (
        ({}, "missed"),
        ({"narrowed": 1}, "marked"),
        ({"valid": [True]}, "right"),
        ({"valid": [False] * 2, "narrowed": 1}, "missed"),
        ({"invalid": [True]}, "wrong"),
        ({"invalid": [True], "narrowed": 1}, "wrong"),
        ({"outcome": "crash"}, "crash"),
        ({"invalid": [True], "marked": True}, "marked"),
    ):
        assert grammar.verdict(answer | change) == said
    values = np.arange(1, 1002, dtype=float)
    assert grammar.quantiles(values) == {"p50": 501.0, "p99": 991.0, "p99.9": 1000.0, "max": 1001.0}
    assert grammar.summary([])["right_percent"] == 0


@pytest.mark.parametrize(
    ("special", "stop", "end"),
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
        (("<a>", "<b>"), None, "<a>, <b>: name one"),
        (("<a>",), "<c>", "no token '<c>'"),
    ],
)
def test_the_end_token_is_found_by_name_or_refused(tmp_path, special, stop, end):
    """A vocabulary's own end token stops documents, never whichever id is last."""
    byte_tokenizer(*special).save(str(tmp_path / "t.json"))
    if end in special:
        tokenizer, vocabulary = data.load_tokenizer(tmp_path / "t.json", stop)
        assert vocabulary.stop_ids == (tokenizer.token_to_id(end),)
    else:
        with pytest.raises(OptionError, match=re.escape(end)):
            data.load_tokenizer(tmp_path / "t.json", stop)


def test_samples_are_every_kth_row_with_instances(tmp_path):
    """Every k-th row of each file is picked, among those that have instances."""
    lines = [
        json.dumps({"id": i, "schema": True, "valid": [1] * (i % 2), "invalid": []})
        for i in range(12)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [row["id"] for row in data.rows_of(tmp_path, 2)] == [1, 5, 9]


def test_what_the_prefix_cache_saves_is_found_and_changes_no_output(capsys):
    """All whole pages of what calls share are found by the engine that keeps them."""
    target, drafter = map(str, demo_model())
    asked = ["--tokens", "200", "--calls", "2", "--model", target, "--draft", drafter]
    assert prefix.main(asked) == 0
    cached, without, ratio = capsys.readouterr().out.splitlines()[1:]
    assert cached.split()[3] == "192" and without.split()[1] == "0"
    assert ratio.startswith("200 shared tokens: ")
