"""Random JSON schemas, compared with jsonschema; see `schema_fuzz`."""

from __future__ import annotations

import collections
import gzip
from pathlib import Path
from typing import Any

import pytest
from schema_fuzz import check_random_schema

from graft.grammar import LLGuidanceBackend, Vocabulary

pytest.importorskip("llguidance")


def check_seeds(
    seeds: range, backend: LLGuidanceBackend | None = None, automata: bool = False
) -> collections.Counter[str]:
    """Check the schemas of some seeds, and return how many have each status.

    No output is invalid, no walk ends early, and no value is refused without a reason.
    """
    problems = []
    statuses: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        outcome = check_random_schema(seed, backend=backend, automata=automata)
        problems += outcome.problems
        statuses[outcome.status] += 1
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {dict(statuses)}")
    assert problems == []
    exact = statuses["exact"] + statuses["automaton"] + statuses["only automaton"]
    assert exact > 0.6 * len(seeds) and statuses["refused"] < 0.3 * len(seeds)
    return statuses


def more_seeds(first: int) -> list[Any]:
    """Return ranges of 10,000 seeds in total, for tests that run with --full only."""
    ranges = [range(start, start + 2_500) for start in range(first, first + 10_000, 2_500)]
    return [pytest.param(seeds, marks=pytest.mark.full) for seeds in ranges]


@pytest.mark.parametrize("seeds", [range(60), *more_seeds(10_000)], ids=str)
def test_random_schemas_are_enforced_exactly(seeds: range):
    check_seeds(seeds)


@pytest.mark.parametrize("seeds", [range(100, 125), *more_seeds(30_000)], ids=str)
def test_automata_of_random_schemas_are_exact(seeds: range):
    statuses = check_seeds(seeds, automata=True)
    assert statuses["automaton"] > statuses["exact"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["cl100k-llama3-like", "deepseek-128k"])
def test_random_schemas_with_tokens_of_real_models(shared_data: Path, name: str):
    tokenizers = pytest.importorskip("tokenizers")
    text = gzip.decompress((shared_data / "tokenizers" / f"{name}.json.gz").read_bytes())
    tokenizer = tokenizers.Tokenizer.from_str(text.decode())
    size = tokenizer.get_vocab_size()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, [size - 1])
    check_seeds(range(20_000, 20_300), LLGuidanceBackend(vocabulary))
