"""Regular languages by derivatives (Brzozowski 1964), as an oracle of distances and closing rows.

`LanguageBackend` is a grammar backend in pure Python for a small notation of regular expressions.
Its matchers know the exact distance of every state: the smallest number of tokens, the stop id
included, that complete the text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from graft.grammar import CompiledGrammar, GrammarSpec, Matcher, Vocabulary
from graft.grammar.backends.base import ending_ids
from graft.grammar.matcher import NO_BUDGET

#: A language is a tuple: ("bytes", set), ("seq", first, rest), ("or", set), ("star", x).
Language = tuple[Any, ...]
NOTHING: Language = ("or", frozenset())
EMPTY: Language = ("star", NOTHING)


def seq(first: Language, rest: Language) -> Language:
    if NOTHING in (first, rest):
        return NOTHING
    if first == EMPTY:
        return rest
    if first[0] == "seq":
        return seq(first[1], seq(first[2], rest))
    return first if rest == EMPTY else ("seq", first, rest)


def either(options: Iterable[Language]) -> Language:
    found: set[Language] = set()
    for option in options:
        found |= option[1] if option[0] == "or" else {option}
    return found.pop() if len(found) == 1 else ("or", frozenset(found))


@functools.lru_cache(1 << 18)
def has_empty(language: Language) -> bool:
    kind = language[0]
    if kind == "seq":
        return has_empty(language[1]) and has_empty(language[2])
    return kind == "star" or (kind == "or" and any(map(has_empty, language[1])))


@functools.lru_cache(1 << 18)
def after_byte(language: Language, byte: int) -> Language:
    """Return the language of the texts that may follow `byte`."""
    kind = language[0]
    if kind == "bytes":
        return EMPTY if byte in language[1] else NOTHING
    if kind == "or":
        return either(after_byte(option, byte) for option in language[1])
    if kind == "star":
        return seq(after_byte(language[1], byte), language)
    rest = seq(after_byte(language[1], byte), language[2])
    return either([rest, after_byte(language[2], byte)]) if has_empty(language[1]) else rest


def parse(pattern: str) -> Language:
    """Parse a pattern of ASCII characters, classes without negation, groups, ``|*+?{m,n}``."""
    at = 0

    def alternatives() -> Language:
        nonlocal at
        options = [sequence()]
        while pattern[at : at + 1] == "|":
            at += 1
            options.append(sequence())
        return either(options)

    def sequence() -> Language:
        parts = []
        while at < len(pattern) and pattern[at] not in "|)":
            parts.append(repeated())
        return functools.reduce(lambda rest, part: seq(part, rest), reversed(parts), EMPTY)

    def repeated() -> Language:
        nonlocal at
        part = atom()
        if pattern[at : at + 1] in ("*", "+", "?"):
            mark = pattern[at]
            at += 1
            star = ("star", part)
            return {"*": star, "+": seq(part, star), "?": either([part, EMPTY])}[mark]
        if pattern[at : at + 1] == "{":
            end = pattern.index("}", at)
            low, _, high = pattern[at + 1 : end].partition(",")
            at = end + 1
            result = EMPTY
            for count in range(int(high or low), 0, -1):
                result = seq(part, result)
                if count > int(low):
                    result = either([result, EMPTY])
            return result
        return part

    def atom() -> Language:
        nonlocal at
        char = pattern[at]
        at += 1
        if char == "(":
            inner = alternatives()
            at += 1
            return inner
        if char == "[":
            found = set()
            while pattern[at] != "]":
                first = last = ord(pattern[at])
                at += 1
                if pattern[at] == "-" and pattern[at + 1] != "]":
                    last = ord(pattern[at + 1])
                    at += 2
                found |= set(range(first, last + 1))
            at += 1
            return ("bytes", frozenset(found))
        if char == "\\":
            char = pattern[at]
            at += 1
        return ("bytes", frozenset([ord(char)]))

    return alternatives()


class ReferenceLanguage:
    """A language for one vocabulary, with the distance of each of its states."""

    def __init__(self, pattern: str, vocabulary: Vocabulary):
        self.start = parse(pattern)
        self._tokens = vocabulary.tokens
        self._next: dict[Language, dict[int, Language]] = {}
        self.distances: dict[Language, float] = {}
        pending = [self.start]
        while pending:
            state = pending.pop()
            if state not in self._next:
                self._next[state] = self._successors(state)
                pending += self._next[state].values()
        self.distances = {state: 1 if has_empty(state) else np.inf for state in self._next}
        changed = True
        while changed:
            changed = False
            for state, successors in self._next.items():
                nearest = min(
                    (self.distances[after] for after in set(successors.values())), default=np.inf
                )
                if 1 + nearest < self.distances[state]:
                    self.distances[state] = 1 + nearest
                    changed = True

    def next(self, state: Language) -> dict[int, Language]:
        """Return the state after each legal token. States that cannot end are left out."""
        return self._next[state]

    def _successors(self, state: Language) -> dict[int, Language]:
        found = {}
        for token, text in enumerate(self._tokens):
            after = state
            for byte in text:
                after = after_byte(after, byte)
            if text and after != NOTHING:
                found[token] = after
        return found


class LanguageMatcher(Matcher):
    """Matcher of a `ReferenceLanguage`."""

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        super().__init__(compiled, stop_ids)
        self._language: ReferenceLanguage = compiled.native
        self._states: list[Language | None] = [self._language.start]

    def accept(self, token: int) -> bool:
        state = self._states[-1]
        if state is None or token not in self.allowed(NO_BUDGET):
            return False
        self._states.append(None if token in self.stop_ids else self._language.next(state)[token])
        return True

    def allowed(self, budget: int) -> list[int]:
        """Return the ids of the row with this budget."""
        state = self._states[-1]
        assert state is not None
        ids = [
            token
            for token, after in self._language.next(state).items()
            if self._language.distances[after] <= budget - 1
        ]
        return [*ids, *self.stop_ids] if has_empty(state) else ids

    def fill(self, row: np.ndarray, budget: int = NO_BUDGET) -> bool:
        self._require_not_terminated()
        legal = np.zeros(self.words * 32, bool)
        legal[self.allowed(budget)] = True
        row[:] = np.packbits(legal, bitorder="little").view(np.int32)
        return True

    def rollback(self, tokens: int) -> None:
        if tokens:
            del self._states[-tokens:]

    def is_terminated(self) -> bool:
        return self._states[-1] is None

    def distance(self) -> int:
        state = self._states[-1]
        return 0 if state is None else int(self._language.distances[state])


class LanguageBackend:
    """Grammar backend of `ReferenceLanguage`: the pattern is the text of the specification."""

    name = "reference language"

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        language = ReferenceLanguage(spec.text, self.vocabulary)
        return CompiledGrammar(self, spec, language, 1 << 16)

    def matcher(self, compiled: CompiledGrammar, stop_ids: Any = None) -> LanguageMatcher:
        return LanguageMatcher(compiled, ending_ids(self, compiled, stop_ids))
