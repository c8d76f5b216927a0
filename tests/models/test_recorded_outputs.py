"""Recorded outputs of engines, which a change of the engine must not change.

The outputs were recorded with commit 3d46e1de. Where a change is intended, record them again::

    GRAFT_DEVICE=soft python tests/models/test_recorded_outputs.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from engine_cases import CONFIGURATIONS, settled, workload, workload_in_turn
from engine_util import demo_engine

from graft.models.engine.engine import Engine
from graft.models.request import Logprob, Request

RECORD = Path(__file__).parents[1] / "fixtures" / "recorded_outputs.json"
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
SAMPLING = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "top_p": 0.95, "verify": "coupled"},
    "sampled": {"temperature": 0.9},
}


def record_key(sampling: str, index: int) -> str | None:
    """Return the key of a configuration's recorded outputs; None if they are not reproducible.

    Greedy and coupled outputs depend on the weights only. Other outputs depend on the drafts, and
    if the time of grammar steps is limited, on that time.
    """
    options = CONFIGURATIONS[index]
    relaxed = options["verify"] == "relaxed"
    if sampling == "coupled" or (sampling == "greedy" and not relaxed):
        return f"{sampling} {options.get('weights', 'checkpoint')}"
    is_limited = options.get("grammar_budget_us", 0) is not None
    if is_limited or options.get("draft_length") == "auto":
        return None
    return f"{sampling} {index}"


def generate(engine: Engine, requests: list[Request]) -> list[dict[str, Any]]:
    """Return the outputs of requests as JSON values."""
    outputs = engine.generate(requests)
    found = []
    for output in outputs:
        fields = {"reason": output.reason, "tokens": output.tokens, "text": output.text}
        if output.logprobs is not None:
            fields["logprobs"] = [flat_logprob(entry) for entry in output.logprobs]
        found.append(fields)
    return json.loads(json.dumps(found))


def flat_logprob(entry: Logprob) -> list[float]:
    """Return the numbers of an entry in one list, rounded to keep the record small."""
    pairs = [number for pair in entry.top for number in pair]
    return [round(number, 6) for number in (entry.value, entry.rank, *pairs)]


@pytest.fixture(scope="module")
def record() -> dict[str, list[dict[str, Any]]]:
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize(
    "index, num_turns",
    [
        *((i, 1) for i in range(0, len(CONFIGURATIONS), 9)),
        *(
            pytest.param(i, len(SAMPLING), marks=pytest.mark.full)
            for i in range(len(CONFIGURATIONS))
        ),
    ],
)
def test_engine_outputs_equal_recorded_ones(record, index: int, num_turns: int) -> None:
    """Reasons, tokens and text are equal, log probabilities up to rounding.

    In each turn, the requests use the sampling methods one after another, and in the next turn
    every request uses the next method.

    Since the outputs were recorded, graft refuses schemas with dates for XGrammar, because XGrammar
    allows dates that do not exist.
    """
    keys = {name: key for name in SAMPLING if (key := record_key(name, index))}
    turns = [range(index + turn, index + turn + len(workload())) for turn in range(num_turns)]
    modes = [SAMPLING[name] for name in keys]
    records = [record[key] for key in keys.values()]
    with settled(demo_engine(**CONFIGURATIONS[index])) as engine:
        found = [generate(engine, workload_in_turn(modes, turn[0])) for turn in turns]
    for outputs, turn in zip(found, turns, strict=True):
        recorded = [records[mode % len(records)][i] for i, mode in enumerate(turn)]
        for output, expected in zip(outputs, recorded, strict=True):
            logprobs = output.pop("logprobs", [])
            if output["reason"] == "refused":
                assert CONFIGURATIONS[index]["grammar_backend"] == "xgrammar"
                assert DATE.search(expected["text"])
                continue
            for entry, numbers in zip(logprobs, expected.get("logprobs", []), strict=True):
                assert entry == pytest.approx(numbers, abs=1e-5)
            assert output == {name: expected[name] for name in output}


def test_recorded_outputs_have_every_finish_reason_and_a_test(record) -> None:
    used = {record_key(name, i) for name in SAMPLING for i in range(len(CONFIGURATIONS))}
    assert used - {None} == set(record)
    reasons = {output["reason"] for outputs in record.values() for output in outputs}
    assert reasons == {"stop", "length", "stop_string"}


def main() -> None:
    """Record the outputs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for index in range(len(CONFIGURATIONS)):
        with demo_engine(**CONFIGURATIONS[index]) as engine:
            for sampling in SAMPLING:
                key = record_key(sampling, index)
                if key is not None and key not in found:
                    found[key] = generate(engine, workload(**SAMPLING[sampling]))
    RECORD.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
