"""Tests with the official JSON schema test suite for draft 7, and with schemas in real use."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guide_util import BYTES, accepts
from router_util import Grammar, plain

from graft.grammar import GrammarError, GrammarSpec
from graft.grammar.schema.router import route

pytest.importorskip("llguidance")

#: Keywords for which groups of the suite may be refused. Unsatisfiable schemas may be, too.
REFUSED = {
    "$ref",
    "contains",
    "contentEncoding",
    "contentMediaType",
    "format",
    "maximum",
    "minimum",
    "multipleOf",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "allOf",
    "anyOf",
    "not",
    "oneOf",
    "patternProperties",
    "schema",
    "uniqueItems",
    "if",
    "pattern",
    "dependencies",
    "propertyNames",
    "additionalItems",
}
#: Tests of the suite whose wrong results are ignored: large numbers that grammars do not produce,
#: and annotations of string content.
EXEMPT = ("draft7/optional/bignum#", "draft7/optional/content#", "draft7/optional/float-overflow#0")


def rows_of(path: Path, share: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file; with `share`, about this number of rows at equal distances."""
    if not path.is_file():
        pytest.skip(f"no schemas at {path}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = list(file)
    step = 1 if share is None else max(1, len(lines) // share)
    return [json.loads(line) for line in lines[::step]]


def key_orders(value: Any) -> Iterator[Any]:
    """Yield the value with the keys of its objects in every order."""
    if isinstance(value, dict):
        for keys in itertools.islice(itertools.permutations(value), 120):
            for parts in itertools.product(*(list(key_orders(value[key])) for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        for parts in itertools.islice(itertools.product(*map(list, map(key_orders, value))), 120):
            yield list(parts)
    else:
        yield value


@pytest.mark.parametrize("key_order", ["schema", "any"])
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
def test_json_schema_test_suite(shared_data: Path, step: int, key_order: Any):
    """The schema of each group is either enforced exactly or refused with a reason.

    A valid value must be accepted with its keys in every order, or in at least one order if the
    route is narrowed. An invalid value must not be accepted in any order.
    """
    right = 0
    refused = {}
    wrong = []
    for group in rows_of(shared_data / "json-schema-test-suite" / "draft7.jsonl.gz")[::step]:
        try:
            found = route(group["schema"], draft=7, key_order=key_order)
        except GrammarError as error:
            assert "no output" in str(error) and not group["valid"], group["id"]
            refused[group["id"]] = "schema"
            continue
        if not found.exact:
            assert all(r.keyword in REFUSED for r in found.reasons), (group["id"], found.reasons)
            refused[group["id"]] = found.reasons[0].keyword
            continue
        grammar = Grammar.routed(found)
        enough = any if found.narrowed else all
        formats_narrowed = any(reason.keyword == "format" for reason in found.narrowed)
        missed = [
            value
            for value in group["valid"]
            if not formats_narrowed
            and not enough(grammar.accepts_value(text) for text in key_orders(plain(value)))
        ]
        leaked = [
            v for v in group["invalid"] if any(grammar.accepts_value(t) for t in key_orders(v))
        ]
        if missed or leaked:
            wrong.append((group["id"], missed, leaked))
        else:
            right += 1
    assert [entry for entry in wrong if not entry[0].startswith(EXEMPT)] == []
    assert right >= 240 // step and len(refused) <= 80 // step, (right, refused)


@pytest.mark.parametrize("share, timeout_s", [(6, 3), pytest.param(25, 5, marks=pytest.mark.full)])
def test_real_schemas_accept_no_invalid_instance(shared_data, serve, share, timeout_s):
    """No invalid instance is accepted, and most valid instances are.

    Some valid instances are not accepted, because the grammar fixes the order of keys and forbids
    additional properties.
    """
    service = serve(vocabulary=BYTES, timeout_s=timeout_s)  # slower schemas count as refused
    compiled = refused = 0
    outcome = {True: [0, 0], False: [0, 0]}  # valid: [refused, accepted]
    for split in ("BFCL", "Github_easy", "Github_medium", "Glaiveai2K", "JME"):
        for row in rows_of(shared_data / "maskbench" / f"{split}.jsonl.gz", share):
            try:
                grammar = service.submit(GrammarSpec.json_schema(row["schema"])).result()
            except GrammarError:
                refused += 1
                continue
            compiled += 1
            for valid in (True, False):
                for instance in row["valid" if valid else "invalid"]:
                    fits = accepts(grammar, json.dumps(instance, ensure_ascii=False))
                    outcome[valid][fits] += 1
                    assert valid or not fits, (row["id"], instance)
    assert compiled > 3.2 * share and compiled > refused
    assert sum(outcome[False]) > 3 * share
    assert outcome[True][True] > 0.85 * sum(outcome[True])
