"""User-defined grammar backends. Tests refer to them by import names like ``own_backend:fail``."""

from __future__ import annotations

from reference_matchers import ReferenceLLGuidance

from graft.grammar import GrammarError, XGrammarBackend


class OwnBackend(XGrammarBackend):
    """XGrammar's backend under another name."""

    name = "own"


class UnfinishedBackend(ReferenceLLGuidance):
    """Backend that fails for some grammars: during compilation, or when a mask row is filled."""

    def compile(self, spec):
        if spec.text == "compile+":
            raise NotImplementedError
        if spec.text == "refused+":
            raise GrammarError("regex: not this one")
        return super().compile(spec)

    def matcher(self, compiled, stop_ids=None):
        matcher = super().matcher(compiled, stop_ids)
        if compiled.spec.text == "fill+":
            matcher.fill = fail_to_fill
        return matcher


def fail_to_fill(row):
    raise NotImplementedError


def fail(vocabulary):
    raise NotImplementedError
