"""The schemas of a structural tag's tags, as one backend enforces them."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import GrammarError

if TYPE_CHECKING:
    from .spec import GrammarSpec

__all__ = ["resolved_tags", "said_of_tag"]

_HINT = " (partial=True takes the schema all the same)"  # which tags do not know


def said_of_tag(error: GrammarError) -> str:
    """The refusal of a schema as that of a tag's, which is never taken in part."""
    return str(error).removesuffix(_HINT)


@functools.lru_cache(maxsize=256)
def resolved_tags(spec: GrammarSpec, backend: str) -> GrammarSpec:
    """A structural tag whose tags' schemas are what ``backend`` is to compile.

    LLGuidance gets them rewritten where that is equivalent, with objects closed that list their
    properties and say nothing of others; XGrammar gets them as they stand, and closes them itself.

    Raises
    ------
    GrammarError
        If the backend cannot enforce a tag's schema exactly: the tag, and why not.
    """
    from .spec import stated

    parts = json.loads(spec.text)
    for tag in parts["tags"]:
        try:
            one = stated(json.dumps(tag["schema"]), False, True, False, backend, "schema")
        except GrammarError as error:
            said = f"structural tag {tag['begin']!r}: {said_of_tag(error)}"
            raise GrammarError(said) from error
        tag["schema"] = json.loads(one.text)
    return replace(spec, text=json.dumps(parts, ensure_ascii=False))
