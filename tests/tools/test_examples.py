"""The examples run, and print what their rooms promise."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import graft.tools.examples

FOLDER = Path(graft.tools.examples.__path__[0])


def graph_with_host_step(lines):
    numbers = list(range(8))
    for line in lines:
        numbers = [((n * n + 1) % 10) ** 2 for n in numbers]
        assert json.loads(line) == numbers
    assert len(lines) == 3


def mask_logits(lines):
    assert lines == ["[3, 5, 33] best: 33", f"{list(range(40))} best: 39", "[0, 1, 2, 3] best: 3"]


def matcher_by_hand(lines):
    assert lines[0].split() == ["4", "legal,", "taken:", "b'n'"]  # y, ye, n and no at most
    assert re.fullmatch(r"no, [0-9]7 \| only the stop token is legal: True", lines[-1])
    assert len(lines) == len("no, 17") + 2


def engine(lines):
    record = json.loads(lines[0].split(" (")[0])
    assert set(record) == {"name", "age"} and type(record["age"]) is int
    assert re.match(r"[A-Z]{2}-[0-9]{4} \(stop", lines[1]) and re.match("(yes|no) ", lines[2])
    assert isinstance(json.loads("".join(lines[3:-1])), dict)
    assert float(lines[-1].split()[0]) > 1


def own_drafter(lines):
    with_it, without = (
        re.fullmatch(r"'(.+)': (\d+) of (\d+) drafts accepted", line) for line in lines[:2]
    )
    assert with_it and without and with_it[1] == without[1] and lines[2] == "same text: True"
    assert 0 < int(with_it[2]) < int(with_it[3]) and without[3] == "0"


def host_drafter(lines):
    with_it, without = (
        re.fullmatch(r"'(.+)': (\d+) drafts accepted, (\d+) rounds", line) for line in lines
    )
    assert with_it and without and with_it[1] == without[1]
    assert int(with_it[2]) > 0 == int(without[2]) and int(with_it[3]) < int(without[3])


def prefill_apart(lines):
    texts = [re.fullmatch(r"(.+) \(([0-9]+) tokens came .*: True", line) for line in lines]
    assert all(int(text[2]) >= 16 for text in texts) and re.match(r"[A-Z]{2}-[0-9]{4}", lines[0])
    assert isinstance(json.loads(texts[1][1]), dict) and len(lines) == 2


CHECKS = {
    check.__name__: check
    for check in (
        graph_with_host_step,
        mask_logits,
        matcher_by_hand,
        engine,
        own_drafter,
        host_drafter,
        prefill_apart,
    )
}


def test_each_example_has_a_check():
    """No example goes unrun."""
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *CHECKS}


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_prints_what_it_says(name, device, capsys):
    """It runs to its end, and its output is what is promised."""
    importlib.import_module(f"graft.tools.examples.{name}").main()
    CHECKS[name](capsys.readouterr().out.splitlines())
