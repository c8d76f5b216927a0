"""Grammars, matchers and the guided decoder."""

from .backend import BACKENDS, GrammarBackend, make_backend
from .compile import CompileService
from .decoder import GuidedDecoder, GuidedRequest
from .errors import GrammarError, GuideError
from .judge import check_output
from .llguidance import LLGuidanceBackend
from .marker import Marker
from .matcher import CompiledGrammar, Matcher
from .resolve import resolved
from .schema.router import Route, route
from .schema.terms import Reason
from .service import GrammarService
from .spec import Spec
from .statement import GrammarSpec, StructuralTag
from .vocabulary import Vocabulary
from .xgrammar import XGrammarBackend

__all__ = [
    "BACKENDS",
    "CompileService",
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
