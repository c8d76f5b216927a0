"""The official JSON schema test suite, draft 7: every group is right or refused by name."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_util import Grammar, plain

from graft.grammar import GrammarError
from graft.grammar.schema.router import route

pytest.importorskip("llguidance")

#: Keywords that groups may be refused for, beside schemas that allow nothing.
REFUSED = {
    "$ref", "contains", "contentEncoding", "contentMediaType", "format", "maximum", "minimum",
    "multipleOf", "not", "oneOf", "patternProperties", "schema", "uniqueItems", "if", "pattern",
    "dependencies", "propertyNames", "additionalItems",
}  # fmt: skip
#: Whole numbers this large are spelled in a way that grammars do not write; content is annotation.
EXEMPT = ("draft7/optional/float-overflow#0", "draft7/optional/content#")


def orders(value: Any) -> Iterator[Any]:
    """The value with the keys of its objects in every order."""
    if isinstance(value, dict):
        for keys in itertools.islice(itertools.permutations(value), 120):
            for parts in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        for parts in itertools.islice(itertools.product(*map(list, map(orders, value))), 120):
            yield list(parts)
    else:
        yield value


@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_every_group_is_right_or_refused_by_name(shared_data: Path, key_order: Any):
    """Of groups that are not refused, every valid value can be produced and no invalid one.

    A valid value is produced with its keys in every order, whole numbers without fraction; in one
    order if the route says so. An invalid value must not be produced in any order.
    """
    path = shared_data / "json-schema-test-suite" / "draft7.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no test suite at {path}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        groups = [json.loads(line) for line in file]
    right, refused, wrong = 0, {}, []
    for group in groups:
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
        said = any(reason.keyword == "format" for reason in found.narrowed)
        missed = [
            value for value in group["valid"]
            if not said and not enough(grammar.takes(text) for text in orders(plain(value)))
        ]  # fmt: skip
        leaked = [v for v in group["invalid"] if any(grammar.takes(t) for t in orders(v))]
        if missed or leaked:
            wrong.append((group["id"], missed, leaked))
        else:
            right += 1
    assert [entry for entry in wrong if not entry[0].startswith(EXEMPT)] == []
    assert right >= 240 and len(refused) <= 80, (right, refused)
