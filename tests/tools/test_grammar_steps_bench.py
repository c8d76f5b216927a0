"""Test of the benchmark of grammar steps (graft.tools.bench.grammar_steps)."""

import json

import pytest

from graft.tools.bench import grammar_steps
from graft.tools.demo_model import demo_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("automata", [False, True])
def test_bench_of_steps_compares_filling_with_checking(capsys, tmp_path, automata):
    """All instances are generated, and optimistic rounds fill rows for illegal tokens only."""
    valid = [{"name": "Olga Novak of Oslo, who lives in the north", "age": 42, "other": [1, 2]}]
    row = {"schema": SCHEMA, "valid": valid, "invalid": []}
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "steps.json"
    tokenizer = demo_model()[0] / "tokenizer.json"
    arguments = [tmp_path, "--tokenizer", tokenizer, "--slots", 3, "--rounds", 20, "--out", out]
    arguments += ["--replaced", "0", "0.3", *["--automata"] * automata]
    assert grammar_steps.main(list(map(str, arguments))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["fill", "optimistic", "optimistic"]
    fill, legal, some_illegal = json.loads(out.read_text())
    assert fill["fills"] > 2
    assert legal["fills"] == 0
    assert 0 < some_illegal["fills"] < fill["fills"]
    assert all(result["grammar_us"] > 0 and result["tokens"] > 1 for result in (fill, legal))
