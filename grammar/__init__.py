"""Grammars, matchers and the guided decoder."""

from .backend import BACKENDS, GrammarBackend, make_backend
from .compile import CompileService
from .decoder import GuidedDecoder, GuidedRequest
from .errors import GrammarError, GuideError
from .llguidance import LLGuidanceBackend
from .marker import Marker
from .matcher import CompiledGrammar, Matcher
from .router import Reason, Route, check_output, route
from .service import GrammarService
from .spec import GrammarSpec, StructuralTag
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
    "StructuralTag",
    "Vocabulary",
    "XGrammarBackend",
    "check_output",
    "make_backend",
    "route",
]
