"""The grammar benchmark counts what it says it counts, and survives what it measures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tokenizers

from graft.tools import grammar_bench
from graft.tools.grammar_bench import Child, quantiles, rows_of, summary, verdict
from graft.tools.grammar_bench_plot import plot

pytest.importorskip("llguidance")

ROWS: list[dict[str, Any]] = [
    {"id": "plain", "schema": {"type": "object", "properties": {"a": {"type": "integer"}},
                               "required": ["a"]},
     "valid": [{"a": 1}], "invalid": [{"a": "x"}, {}]},
    {"id": "order",
     "schema": {"type": "object", "properties": {"a": {}, "b": {}, "c": {}, "d": {}}},
     "valid": [{"d": 1, "b": 2.0, "a": 3}], "invalid": [3]},
    {"id": "spelling", "schema": {"items": {"type": "integer"}}, "valid": [[1], [2.0]],
     "invalid": [["x"]]},
    {"id": "too many", "schema": {"properties": {f"k{i}": {} for i in range(65)}},
     "valid": [{"k1": 1, "k0": 1}], "invalid": []},
    {"id": "loose", "schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
     "valid": [["x", "y"]], "invalid": [["x", "x"]]},
    {"id": "nothing", "schema": {"allOf": [{"type": "string"}, {"type": "null"}]},
     "valid": [], "invalid": ["x"]},
    {"id": "no instances", "schema": True, "valid": [], "invalid": []},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of single bytes with an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_the_tool_reports_right_marked_refused_and_other_orders(tokenizer, tmp_path, capsys):
    """Verdicts by subject reach table, JSON and SVG; schemas without instances do not count."""
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    report, picture = tmp_path / "out.json", tmp_path / "out.svg"
    code = grammar_bench.main([
        str(tmp_path), "--tokenizer", str(tokenizer), "--subjects", "llguidance", "auto",
        "--json", str(report), "--svg", str(picture),
    ])  # fmt: skip
    assert code == 0
    found = json.loads(report.read_text())
    auto, stock = found["subjects"]["auto"], found["subjects"]["llguidance"]
    assert found["schemas"] == 6
    assert [auto[k] for k in ("right", "spelling", "marked", "refused", "wrong")] == [2, 0, 3, 1, 0]
    assert [stock[k] for k in ("right", "spelling", "marked", "refused")] == [1, 3, 0, 2]
    assert auto["invalid_accepted"] == 0 and auto["invalid"] == 4
    assert auto["right_percent"] == round(200 / 6, 2)
    assert auto["causes"] == {"uniqueItems": 1, "schema": 1, "type": 1, "properties": 1}
    assert auto["fills"] >= len('{"a": 1}') and auto["fill_us"]["max"] >= auto["fill_us"]["p50"]
    assert {row["id"]: row["verdict"] for row in found["not_right"]["auto"]} == {
        "spelling": "marked", "too many": "marked", "loose": "marked", "nothing": "refused",
    }  # fmt: skip
    assert "auto" in capsys.readouterr().out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_runaway_costs_one_row(tokenizer):
    """A child that takes too long is killed and named; the next row gets a new one."""
    child = Child("llguidance", tokenizer, timeout_s=0.01)
    endless = {"schema": {"type": "string"}, "valid": ["x" * 2_000_000], "invalid": []}
    try:
        assert child.ask(endless)["outcome"] == "timeout"
        child._timeout_s = 60
        assert verdict(child.ask({**ROWS[0]}) | {"marked": False}) == "right"
    finally:
        child.close()


def test_verdicts_put_leaks_before_everything_but_marks():
    """Leaks are wrong unless marked; so are misses unless told of, or only in another order."""
    answer = {"outcome": "compiled", "marked": False, "valid": [True, False], "invalid": [False],
              "spelling": 1}  # fmt: skip
    assert verdict(answer) == "spelling"
    assert verdict({**answer, "spelling": 0}) == "wrong"
    assert verdict({**answer, "spelling": 0, "narrowed": 1}) == "marked"
    assert verdict({**answer, "valid": [False] * 2, "spelling": 0, "narrowed": 1}) == "wrong"
    assert verdict({**answer, "invalid": [True], "narrowed": 1}) == "wrong"
    assert verdict({**answer, "valid": [True]}) == "right"
    assert verdict({**answer, "invalid": [True]}) == "wrong"
    assert verdict({**answer, "invalid": [True], "marked": True}) == "marked"
    assert verdict({"outcome": "crash"}) == "crash"


def test_quantiles_are_numpys_and_empty_data_is_no_number():
    """Median and tail come from the values; without values there are none."""
    values = np.arange(1, 1002, dtype=float)
    assert quantiles(values) == {"p50": 501.0, "p99": 991.0, "p99.9": 1000.0, "max": 1001.0}
    assert quantiles(np.zeros(0)) == {}
    assert summary([])["right_percent"] == 0
    assert "svg" in plot({"nothing": []})


def test_samples_are_every_kth_row_with_instances(tmp_path):
    """every and offset pick rows of each file among those that have instances."""
    lines = [json.dumps({"id": i, "schema": True, "valid": [1] * (i % 2), "invalid": []})
             for i in range(12)]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [row["id"] for row in rows_of(tmp_path, 2, 1)] == [3, 7, 11]
