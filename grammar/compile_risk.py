"""Which compilations XGrammar may be given inside this process, where nothing can kill them.

The others go to a child process; a serialised grammar comes back, which for a small one costs more
than its compilation. Risky is what may run away, crash, or be enforced in part only: XGrammar says
the last by printing, which is caught in the child. Nothing here decides what is *allowed*: a cheap
grammar wrongly held for risky comes out the same, a little later.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from .schema.enforcement import LOOSE, ignored
from .spec import Spec

__all__ = ["risk"]

_TEXT = 1 << 13  # characters of a grammar
_DEPTH = 32
# Characters or items that bounds spell out, multiplied where they nest: a string of up to 32
# characters takes about half a second with a vocabulary of 129k, one of up to 128 several.
_BOUND = 32
_REPEATS = 64  # the same in patterns, which are cheaper
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Atoms that XGrammar takes without a remark; anchors are plain at the ends only.
_PLAIN = re.compile(r"(?:[^\\^$(]|\((?!\?)|\(\?:|\\[dwsDWSnrtfv.\\/\-\[\](){}+*?^$|\"'])*")
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def risk(spec: Spec) -> str:
    """Why XGrammar is better asked in a process that can be killed; empty: no reason is known."""
    if os.environ.get("TVM_FFI_RELEASE_GIL_BY_DEFAULT") == "0":
        return "TVM-FFI is told to hold the GIL while it compiles"
    if len(spec.text) > _TEXT:
        return f"{len(spec.text)} characters"
    if spec.kind == "json_schema":
        return _schema_risk(json.loads(spec.text))
    if spec.kind == "structural_tag":
        tags = json.loads(spec.text)["tags"]
        return next((why for tag in tags if (why := _schema_risk(tag["schema"]))), "")
    if spec.kind == "regex":
        return _pattern_risk(spec.text)
    if spec.kind == "ebnf":
        return _repeats(spec.text)
    return "" if spec.kind == "choice" else f"a grammar of kind {spec.kind}"


def _schema_risk(schema: Any) -> str:
    """Walks every object and array, keywords or not: names of properties may look like keywords."""
    repeats = 0.0
    pending: list[tuple[Any, int, float]] = [(schema, 0, 1.0)]
    while pending:
        part, depth, factor = pending.pop()
        if depth > _DEPTH:
            return f"nested deeper than {_DEPTH}"
        if isinstance(part, list):
            pending += [(value, depth + 1, factor) for value in part]
        if not isinstance(part, dict):
            continue
        for keyword in part:
            if keyword in LOOSE:
                return f"{keyword} may be enforced in part only"
        target = part.get("$ref", "#")
        if isinstance(target, str) and not (target == "#" or target.startswith("#/")):
            return f"$ref {target!r} may be enforced in part only"
        bounds = [part[key] for key in _BOUNDS if isinstance(part.get(key), (int, float))]
        factor *= max([1.0, *map(float, bounds)])
        repeats += factor if bounds else 0
        pattern = part.get("pattern")
        if isinstance(pattern, str):
            if bounds:
                return "pattern beside bounds may be enforced in part only"
            if why := _pattern_risk(pattern):
                return why
        pending += [(value, depth + 1, factor) for value in part.values()]
    if repeats > _BOUND:
        return f"bounds spell out {repeats:.0f} characters or items"
    return next((str(reason) for reason in ignored(schema)), "")


def _pattern_risk(pattern: str) -> str:
    inner = pattern[pattern.startswith("^") : len(pattern) - pattern.endswith("$")]
    if not _PLAIN.fullmatch(inner):
        return "a pattern that XGrammar may read in part only"
    return _repeats(inner)


def _repeats(text: str) -> str:
    """Counts add up side by side, and multiply where groups may nest them."""
    counts = [int(high or low or 1) for low, high in _COUNT.findall(text)]
    total = sum(counts)
    if "){" in text.replace(" ", ""):
        total = 1
        for count in counts:
            total *= max(count, 1)
    if total > _REPEATS:
        return f"repetitions spell out {total} items"
    return f"groups nested deeper than {_DEPTH}" if _nesting(text) > _DEPTH else ""


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    return deepest
