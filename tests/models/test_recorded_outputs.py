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

from engine_cases import CONFIGURATIONS, settled, workload
from engine_util import demo_engine

from graft.models.request import Logprob

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


def generate(sampling: str, index: int) -> list[dict[str, Any]]:
    """Return the outputs of the workload as JSON values."""
    with settled(demo_engine(**CONFIGURATIONS[index])) as engine:
        outputs = engine.generate(workload(**SAMPLING[sampling]))
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
    "index",
    [pytest.param(i, marks=pytest.mark.full if i % 6 else ()) for i in range(len(CONFIGURATIONS))],
)
def test_engine_outputs_equal_recorded_ones(record, index: int) -> None:
    """Reasons, tokens and text are equal, log probabilities up to rounding.

    Since the outputs were recorded, graft refuses schemas with dates for XGrammar, because XGrammar
    allows dates that do not exist.
    """
    for sampling in SAMPLING:
        key = record_key(sampling, index)
        if key is None:
            continue
        for output, expected in zip(generate(sampling, index), record[key], strict=True):
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
        for sampling in SAMPLING:
            key = record_key(sampling, index)
            if key is not None and key not in found:
                found[key] = generate(sampling, index)
    RECORD.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
