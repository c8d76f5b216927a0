"""Structured output: the package jsonschema validates the finished outputs."""

import gzip
import json
from collections import Counter

import jsonschema
import pytest
from engine_util import demo_engine

from graft.grammar import check_output
from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.request import Limits, Request


def schemas(data, count):
    """Return small schemas of MaskBench, taking one from each of its splits in turn.

    They are the smallest ones of the `count` shortest rows of each split.
    """
    splits = []
    for path in sorted((data / "maskbench").glob("*.jsonl.gz")):
        with gzip.open(path, "rb") as lines:
            rows = [json.loads(line) for line in sorted(lines, key=len)[:count]]
        rows.sort(key=lambda row: len(json.dumps(row["schema"])))
        splits.append(rows)
    chosen = []
    longest = max(len(rows) for rows in splits)
    for i in range(longest):
        chosen += [rows[i] for rows in splits if i < len(rows)]
    return chosen[:count]


@pytest.mark.parametrize("count", [20, pytest.param(480, marks=pytest.mark.full)])
def test_json_schema_outputs_are_valid(shared_data, count):
    """All finished outputs satisfy their schemas, and at least 60 % of the requests finish."""
    counts = Counter()
    violations = []
    with demo_engine(max_batch_size=8, limits=Limits(compile_s=5.0)) as engine:
        cases = []
        for row in schemas(shared_data, count):
            try:
                spec = GrammarSpec.json_schema(row["schema"])
            except GrammarError:  # a keyword that no backend enforces
                counts["refused keyword"] += 1
                continue
            text = f"Fill in the record {row['id'][:40]}."
            cases.append((row, Request(prompt=text, grammar=spec, max_tokens=400)))
        outputs = engine.generate([request for _, request in cases])
        for (row, _), output in zip(cases, outputs, strict=True):
            counts[output.reason] += 1
            if not output.finished:
                continue
            validator = jsonschema.validators.validator_for(row["schema"])
            try:
                errors = list(validator(row["schema"]).iter_errors(json.loads(output.text)))
            except (jsonschema.exceptions._WrappedReferencingError, RecursionError):
                counts["not validatable"] += 1
                continue
            if errors:
                violations.append(f"{row['id']}: {errors[0].message[:200]}")
    print(json.dumps(counts))
    ran = sum(counts[r] for r in ("stop", "length", "dead_end", "error"))
    assert not violations, violations
    assert counts["error"] == 0
    assert counts["stop"] >= 0.6 * ran, counts


@pytest.mark.parametrize(("multiple", "holds"), [(7, True), (1_000_003, False)])
def test_partial_schema_is_checked_after_generation(multiple, holds):
    """`check_output` checks text against keywords that the grammar does not enforce."""
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "multipleOf": multiple}},
        "required": ["age"],
        "additionalProperties": False,
    }
    spec = GrammarSpec.json_schema(schema, partial=True, backend="xgrammar")
    with demo_engine(max_batch_size=1) as engine:
        (output,) = engine.generate([Request(prompt="age: 42", grammar=spec, max_tokens=40)])
    assert output.finished and json.loads(output.text) == {"age": 42}
    assert check_output(spec.schema, output.text) is holds
