"""Whether a stated grammar is one at all, asked of the installed backends without a vocabulary."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from .errors import GrammarError
from .preflight import BACKENDS

if TYPE_CHECKING:
    from .spec import GrammarSpec

__all__ = ["check_syntax"]


def check_syntax(spec: GrammarSpec) -> GrammarSpec:
    """The specification, if some installed backend can read it; takes about a millisecond.

    What XGrammar might run away with is not asked of it here (`compile_risk`): such a grammar is
    read when it is compiled, in a process that can be killed.

    Raises
    ------
    GrammarError
        With the reason, if every backend in question refuses the grammar.
    """
    names = [spec.backend] if spec.backend else list(BACKENDS)
    asked = {"llguidance": _llguidance, "xgrammar": _xgrammar}
    said = {name: asked[name](spec) for name in names if importlib.util.find_spec(name)}
    if said and all(said.values()):
        first = said.get("xgrammar" if spec.kind in ("ebnf", "regex") else "llguidance")
        raise GrammarError(f"{spec.kind}: {first or next(iter(said.values()))}")
    return spec


def _llguidance(spec: GrammarSpec) -> str:
    from .backends.llguidance import read

    return read(spec)


def _xgrammar(spec: GrammarSpec) -> str:
    from .backends.xgrammar import read

    try:
        return read(spec.resolved("xgrammar"))
    except GrammarError as error:
        return str(error).removeprefix("structural tag ")
