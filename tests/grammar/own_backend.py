"""Grammar backends of users, which tests name as ``own_backend:attribute``."""

from __future__ import annotations

from reference_matchers import ReferenceLLGuidance

from graft.grammar import GrammarError, XGrammarBackend


class OwnBackend(XGrammarBackend):
    """Backend that counts nothing and enforces what XGrammar enforces."""

    name = "own"


class UnfinishedBackend(ReferenceLLGuidance):
    """Backend whose matchers or whose compilation fail for some grammars."""

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
