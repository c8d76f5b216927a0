"""Grammars, matchers and the guided decoder."""

from .backends.llguidance import LLGuidanceBackend
from .backends.registry import BACKENDS, make_backend
from .backends.xgrammar import XGrammarBackend
from .compile.service import GrammarService
from .decoder import GuidedDecoder, GuidedRequest
from .errors import GrammarError, GuideError
from .judge import check_output
from .matcher import CompiledGrammar, GrammarBackend, Matcher
from .resolve import resolved
from .schema.router import Route, route
from .schema.terms import Reason
from .spec import Marker, Spec
from .statement import GrammarSpec, StructuralTag
from .vocabulary import Vocabulary

__all__ = [
    "BACKENDS",
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarError",
    "GrammarService",
    "GrammarSpec",
    "GuideError",
    "GuidedDecoder",
    "GuidedRequest",
    "LLGuidanceBackend",
    "Marker",
    "Matcher",
    "Reason",
    "Route",
    "Spec",
    "StructuralTag",
    "Vocabulary",
    "XGrammarBackend",
    "check_output",
    "make_backend",
    "resolved",
    "route",
]
