"""Grammars, matchers and the guided decoder."""

from .compile import CompileService
from .decoder import GuidedDecoder, GuidedRequest
from .errors import GrammarError, GuideError
from .matcher import CompiledGrammar, Matcher
from .spec import GrammarSpec
from .vocabulary import Vocabulary
from .xgrammar import XGrammarBackend

__all__ = [
    "CompileService",
    "CompiledGrammar",
    "GrammarError",
    "GrammarSpec",
    "GuideError",
    "GuidedDecoder",
    "GuidedRequest",
    "Matcher",
    "Vocabulary",
    "XGrammarBackend",
]
