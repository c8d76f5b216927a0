"""Test of the benchmark of grammar overhead (graft.tools.bench.grammar_overhead)."""

import json
import statistics

import pytest

from graft.grammar import GrammarSpec, resolve_spec
from graft.grammar.automaton.lower import compile_automaton
from graft.tools.bench import grammar_overhead


def test_bench_writes_tables_json_and_chart(capsys, tmp_path):
    options = "--slots 2 --drafts 2 --kinds choice ebnf --modes fill device --minutes 0.01"
    assert grammar_overhead.main([*options.split(), "--out", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = ["grammar", "drafts", "host", "slots", "K", "fill", "device"]
    assert lines[1] == header and lines[6] == header
    assert lines[2][:5] == ["choice", "chain", "idle", "2", "2"] and float(lines[2][6]) > 0
    assert lines[3][0] == "ebnf" and float(lines[3][5]) > 0 and lines[3][6] == "-"
    assert float(lines[7][6]) == 0  # device rounds have no host steps
    results = json.loads((tmp_path / "grammar_overhead.json").read_text())
    found = [(result["setup"]["mode"], result["kind"]) for result in results]
    assert found == [("fill", "choice"), ("fill", "ebnf"), ("device", "choice")]
    for result in results:
        assert result["overhead"] > 0 and result["round_us"] > 0
        assert (result["grammar_us"] > 0) == (result["setup"]["mode"] == "fill")
    assert (tmp_path / "grammar_overhead.svg").read_text().startswith("<svg")


def test_bench_selects_setups():
    """Modes that do not apply to a shape, a draft length or the kinds of grammars are left out."""
    names = "--slots 1 8 --drafts 0 3 --shapes chain tree --hosts idle busy --kinds ebnf"
    found = set(grammar_overhead.setups(grammar_overhead.parse_options(names.split())))
    modes = {"fill", "probe", "optimistic", "loop"}
    assert {setup.mode for setup in found} == modes
    for slots in (1, 8):
        for host in ("idle", "busy"):
            keys = {s[1:4] for s in found if (s.slots, s.host) == (slots, host)}
            chains = {(3, "chain", mode) for mode in modes}
            plain = {(0, "chain", mode) for mode in modes - {"probe"}}
            trees = {(3, "tree", mode) for mode in modes - {"fill"}}
            assert keys == chains | plain | trees


@pytest.mark.parametrize("kind", grammar_overhead.KINDS)
def test_kinds_of_grammars_have_automata_as_documented(kind):
    spec = resolve_spec(grammar_overhead.grammar_of(kind), "llguidance")
    assert isinstance(spec, GrammarSpec)
    has_automaton = compile_automaton(spec) is not None
    assert has_automaton == (kind in grammar_overhead.REGULAR)


def test_quartiles_equal_statistics_module():
    values = [3.0, 1.0, 2.0, 5.0, 4.0]
    assert grammar_overhead.quartiles(values) == (2.0, statistics.median(values), 4.0)
    assert grammar_overhead.quartiles([7.0]) == (7.0, 7.0, 7.0)
