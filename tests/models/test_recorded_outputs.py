"""Recorded outputs of engines, which a change of the engine must not change.

The configurations are a covering array: every value of an option occurs together with every value
of every other option that it can be combined with. The drafters are covered as chains and as trees.

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

from engine_cases import (
    DFLASH,
    GROWN_TREE,
    LOOKUP_CASCADE,
    TREE_PATHS,
    RandomDFlash2,
    RandomDrafter,
    propose_repeat,
    settled,
    workload,
)
from engine_util import TARGET, demo_engine

from graft.models.drafters import NGram, Suffix, UserDrafter
from graft.models.request import Logprob

RECORD = Path(__file__).parents[1] / "fixtures" / "recorded_outputs.json"
FEW_PAGES = {"pages": 40, "page_size": 16, "max_length": 400}
PATHS = {"draft_length": 9, "draft_tree": TREE_PATHS}
#: Engine options. The default drafter is the EAGLE-3 head of the demo.
CONFIGURATIONS: list[dict[str, Any]] = [
    {
        "max_batch_size": 1,
        **PATHS,
        "overlap": False,
        **FEW_PAGES,
        "grammar_transport": "mailbox",
        "verify": "per_token",
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "draft_length": "auto",
        "draft_masking": "probe",
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "rejection",
        "forced_drafts": True,
        "grammar_backend": "xgrammar",
        "programmatic": False,
    },
    {
        "max_batch_size": 3,
        "drafter": RandomDFlash2(),
        "draft_masking": "none",
        "generation": "graph",
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "relaxed",
        "device_automata": True,
    },
    {
        "max_batch_size": 3,
        "drafter": TARGET,
        "draft_length": 1,
        "composition": "two",
        **FEW_PAGES,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "coupled",
        "forced_drafts": True,
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 8,
        "drafter": DFLASH,
        "draft_masking": "none",
        "generation": "graph",
        **FEW_PAGES,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "rejection",
        "device_automata": True,
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 1,
        "drafter": Suffix,
        **GROWN_TREE,
        "draft_masking": "none",
        "composition": "two",
        "grammar_transport": "mailbox",
        "verify": "coupled",
        "grammar_backend": "xgrammar",
        "programmatic": False,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDrafter(3),
        "draft_length": 1,
        "grammar_transport": "mailbox",
        "verify": "relaxed",
        "device_automata": True,
        "forced_drafts": True,
        "weights": "fp8",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "drafter": RandomDrafter(rank=8),
        "draft_length": "auto",
        "draft_masking": "probe",
        "composition": "two",
        **FEW_PAGES,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "relaxed",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": DFLASH,
        **PATHS,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "per_token",
        "grammar_backend": "xgrammar",
        "programmatic": False,
    },
    {
        "max_batch_size": 3,
        "drafter": NGram,
        **GROWN_TREE,
        **FEW_PAGES,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": 1.0,
        "verify": "rejection",
        "weights": "fp8",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 3,
        "draft_masking": "probe",
        "overlap": False,
        **FEW_PAGES,
        "grammar_transport": "mailbox",
        "verify": "rejection",
        "forced_drafts": True,
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "drafter": LOOKUP_CASCADE,
        "draft_length": 1,
        "overlap": False,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "coupled",
        "device_automata": True,
        "forced_drafts": True,
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 3,
        "draft_length": "auto",
        "generation": "graph",
        **FEW_PAGES,
        "grammar_transport": "native",
        "verify": "per_token",
        "device_automata": True,
        "forced_drafts": True,
        "weights": "fp8",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 1,
        "drafter": NGram,
        "draft_length": "auto",
        "draft_masking": "probe",
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "coupled",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDrafter(1),
        **GROWN_TREE,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "native",
        "grammar_budget_us": None,
        "verify": "relaxed",
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 8,
        "drafter": UserDrafter.of(propose_repeat),
        "draft_masking": "probe",
        "composition": "two",
        "grammar_transport": "mailbox",
        "grammar_budget_us": 1.0,
        "verify": "per_token",
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "speculation": False,
        "grammar_transport": "mailbox",
        "grammar_budget_us": None,
        "verify": "per_token",
        "device_automata": True,
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 1,
        "drafter": TARGET,
        **PATHS,
        "draft_masking": "none",
        "composition": "two",
        **FEW_PAGES,
        "grammar_transport": "native",
        "grammar_budget_us": None,
        "verify": "rejection",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "drafter": Suffix,
        "draft_length": 1,
        "draft_masking": "none",
        "generation": "graph",
        "grammar_transport": "spinkernel",
        "verify": "rejection",
        "device_automata": True,
        "weights": "fp8",
        "programmatic": False,
    },
    {
        "max_batch_size": 3,
        **PATHS,
        "draft_masking": "none",
        "grammar_transport": "spinkernel",
        "grammar_budget_us": 1.0,
        "verify": "relaxed",
        "grammar_backend": "xgrammar",
    },
    {
        "max_batch_size": 8,
        "speculation": False,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "coupled",
        "forced_drafts": True,
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 3,
        "drafter": DFLASH,
        "draft_length": "auto",
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "mailbox",
        "verify": "relaxed",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDFlash2(),
        **GROWN_TREE,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "per_token",
        "grammar_backend": "xgrammar",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 8,
        "drafter": DFLASH,
        **PATHS,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "mailbox",
        "verify": "coupled",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 1,
        "drafter": LOOKUP_CASCADE,
        "composition": "two",
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "per_token",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDrafter(rank=8),
        **GROWN_TREE,
        "draft_masking": "none",
        "composition": "two",
        "grammar_transport": "native",
        "verify": "relaxed",
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
]
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
    [pytest.param(i, marks=pytest.mark.full if i % 3 else ()) for i in range(len(CONFIGURATIONS))],
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
