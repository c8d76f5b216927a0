"""Structured output (constrained decoding): grammar specifications, matchers, guided decoder."""

from typing import TYPE_CHECKING, Any

from graft.grammar.backends.llguidance import LLGuidanceBackend
from graft.grammar.backends.registry import BACKENDS, make_backend
from graft.grammar.backends.xgrammar import XGrammarBackend
from graft.grammar.compile.service import GrammarService
from graft.grammar.errors import (
    GrammarBackendError,
    GrammarError,
    GrammarUnavailableError,
    GuideError,
    MatcherError,
)
from graft.grammar.grammar_spec import GrammarSpec, StructuralTag
from graft.grammar.matcher import CompiledGrammar, GrammarBackend, Matcher
from graft.grammar.resolve import ResolvedGrammar, resolve_spec
from graft.grammar.schema.reasons import Reason
from graft.grammar.schema.router import Route, route
from graft.grammar.spec import Marker, Spec
from graft.grammar.validate import check_output
from graft.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graft.grammar.decoder import GuidedDecoder, GuidedRequest

__all__ = [
    "BACKENDS",
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarError",
    "GrammarUnavailableError",
    "GrammarService",
    "GrammarSpec",
    "GuideError",
    "GuidedDecoder",
    "GuidedRequest",
    "LLGuidanceBackend",
    "Marker",
    "Matcher",
    "GrammarBackendError",
    "MatcherError",
    "Reason",
    "ResolvedGrammar",
    "Route",
    "Spec",
    "StructuralTag",
    "Vocabulary",
    "XGrammarBackend",
    "check_output",
    "make_backend",
    "resolve_spec",
    "route",
]


def __getattr__(name: str) -> Any:
    """Import the decoder when it is first used.

    The decoder imports the CUDA bindings. Child processes that compile grammars import this package
    but not the decoder, and therefore start in half the time.
    """
    if name in ("GuidedDecoder", "GuidedRequest"):
        from graft.grammar import decoder

        return getattr(decoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
