"""Tests that the example programs run and print the expected results."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import graft.tools.examples
from graft.tools.examples import one_round

FOLDER = Path(graft.tools.examples.__path__[0])


def check_graph_with_host_step(lines):
    numbers = list(range(8))
    for line in lines:
        numbers = [((n * n + 1) % 10) ** 2 for n in numbers]
        assert json.loads(line) == numbers
    assert len(lines) == 3


def check_mask_logits(lines):
    assert lines == ["[3, 5, 33] best: 33", f"{list(range(40))} best: 39", "[0, 1, 2, 3] best: 3"]


def check_matcher_by_hand(lines):
    # The grammar allows yes and no, so the four legal first tokens are y, ye, n and no.
    assert lines[0].split() == ["4", "legal", "tokens,", "chosen:", "b'n'"]
    assert re.fullmatch(r"no, [0-9]7 \| only the stop token is legal: True", lines[-1])
    assert len(lines) == len("no, 17") + 2


def check_engine(lines):
    record = {"name": "Olga Novak", "age": 42}
    assert json.loads(lines[0].split(" (")[0]) == record
    assert lines[1].startswith("QF-5702 (stop")
    assert re.match("(yes|no) ", lines[2])
    assert json.loads("".join(lines[3:-1])) == record
    assert float(lines[-1].split()[0]) > 1


def check_own_drafter(lines):
    pattern = re.compile(r"'(.+)': (\d+) of (\d+) drafts accepted")
    drafted, plain = (pattern.fullmatch(line) for line in lines[:2])
    assert drafted and plain
    assert drafted[1] == plain[1] == "AA-1111"
    assert lines[2] == "same text: True"
    assert 0 < int(drafted[2]) < int(drafted[3])
    assert plain[3] == "0"


def check_host_drafter(lines):
    pattern = re.compile(r"'(.+)': (\d+) drafts accepted, (\d+) rounds")
    drafted, plain = (pattern.fullmatch(line) for line in lines)
    assert drafted and plain
    assert drafted[1] == plain[1] == "AA-1111"
    assert int(drafted[2]) > 0 == int(plain[2])
    assert int(drafted[3]) < int(plain[3])


def check_disaggregated_prefill(lines):
    pattern = re.compile(r"(.+) \(([0-9]+) tokens were transferred\).*: True")
    outputs = [pattern.fullmatch(line) for line in lines]
    code, record, one_token = outputs
    assert int(code[2]) >= 16 and int(record[2]) >= 16
    assert re.match(r"[A-Z]{2}-[0-9]{4}", code[1])
    assert isinstance(json.loads(record[1]), dict)
    assert int(one_token[2]) == 0 and code[1].startswith(one_token[1])


def check_one_round(lines):
    pattern = re.compile(r"  round \d+: (\d) of 3 drafts accepted, '(.+)'")
    first, second = (lines.index(text) for text, _ in one_round.REQUESTS)
    for answer in (lines[first + 1 : second], lines[second + 1 :]):
        rounds = [pattern.fullmatch(line) for line in answer[:-2]]
        assert rounds[0][1] == "0"  # the first round has no drafts
        assert sum(int(found[1]) for found in rounds) > len(rounds)
        assert "".join(found[2] for found in rounds) == answer[-1].strip()
        committed = sum(int(found[1]) + 1 for found in rounds)
        assert len(json.loads(answer[-2])) in (committed, committed - 1)
    assert json.loads(lines[second - 1]) == {"name": "Olga Novak", "age": 42}
    assert lines[-1] == "  QF-5702"


def check_verify_drafts(lines):
    pattern = re.compile(r"(.+): (\[\[.+\]\]), (\d+) of 12 drafts accepted")
    accepted = {}
    for line in lines:
        mode, tokens, count = pattern.fullmatch(line).groups()
        accepted[mode] = int(count)
        rows = json.loads(tokens)
        assert len(rows) == 4 and sum(map(len, rows)) == int(count) + 4
        assert all(0 <= token < 10 for row in rows for token in row)
    assert list(accepted) == ["greedy", "rejection", "coupled", "coupled drafts"]
    assert accepted["rejection"] > accepted["coupled"] < accepted["coupled drafts"]


def check_xgrammar_interface(lines):
    assert lines[0] == 'forced start: {"city": "'
    values = [json.loads(line) for line in lines[1:]]
    assert len(values) == 3
    for value in values:
        assert list(value) == ["city", "days"]
        assert value["city"] in ("Bern", "Paris", "Rome") and value["days"] in (1, 2, 3)


CHECKS = {
    "disaggregated_prefill": check_disaggregated_prefill,
    "engine": check_engine,
    "graph_with_host_step": check_graph_with_host_step,
    "host_drafter": check_host_drafter,
    "mask_logits": check_mask_logits,
    "matcher_by_hand": check_matcher_by_hand,
    "one_round": check_one_round,
    "own_drafter": check_own_drafter,
    "verify_drafts": check_verify_drafts,
    "xgrammar_interface": check_xgrammar_interface,
}


def test_every_example_has_a_check():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *CHECKS}


@pytest.mark.parametrize("name", CHECKS)
def test_example_prints_expected_output(name, device, capsys):
    importlib.import_module(f"graft.tools.examples.{name}").main()
    CHECKS[name](capsys.readouterr().out.splitlines())
