"""Test of the benchmark of grammar overhead (graft.tools.bench.grammar_overhead)."""

import json
import statistics

import pytest

from graft.grammar import GrammarSpec, resolve_spec
from graft.grammar.automaton.lower import compile_automaton
from graft.tools.bench import grammar_overhead


def test_bench_writes_table_json_and_chart(capsys, tmp_path):
    options = "--slots 2 --drafts 2 --kinds choice ebnf --matchers automaton library --pairs 1"
    assert grammar_overhead.main([*options.split(), "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["grammar", *["choice", "ebnf"] * 2]
    results = json.loads((tmp_path / "grammar_overhead.json").read_text())
    assert [result["kind"] for result in results] == ["choice", "ebnf"] * 2
    for result in results:
        assert result["overhead"] > 0 and result["round_us"] > 0 and result["grammar_us"] > 0
    assert (tmp_path / "grammar_overhead.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("kind", grammar_overhead.KINDS)
def test_kinds_of_grammars_have_automata_as_documented(kind):
    spec = resolve_spec(grammar_overhead.grammar_of(kind), "llguidance")
    assert isinstance(spec, GrammarSpec)
    has_automaton = compile_automaton(spec) is not None
    assert has_automaton == (kind not in ("recursive", "ebnf"))


def test_quartiles_equal_statistics_module():
    values = [3.0, 1.0, 2.0, 5.0, 4.0]
    assert grammar_overhead.quartiles(values) == (2.0, statistics.median(values), 4.0)
    assert grammar_overhead.quartiles([7.0]) == (7.0, 7.0, 7.0)
