"""Recorded rounds of guided speculation: real documents, drafts that are partly wrong.

A document's tokens are what the target would generate. The drafter proposes them too, but each of
its tokens is, with some probability, another legal one; behind such a token it goes on with the
document where that is legal, else with any legal token. Verification accepts drafts as long as they
are the document's. Everything is drawn from one seed, so any number of subjects can replay it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from graft.cudagraph.errors import GraftError
from graft.grammar import CompiledGrammar, GrammarBackend, GrammarService, GrammarSpec, Matcher
from graft.tools.grammar_bench import rows_of

__all__ = ["Document", "Episode", "Move", "documents", "record"]

_AHEAD = 2  # schemas that compile at once


@dataclass(frozen=True)
class Document:
    """A valid instance of a schema as tokens, the stop token included."""

    compiled: CompiledGrammar
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """What one round does to one slot.

    Attributes
    ----------
    tested : the drafts that verification tests, made in the round before.
    tokens : what is committed: the first ``accepted`` of them, and a token of the target unless a
        stop token was accepted.
    drafts : the drafts made in this round, for the next one; none once the document has ended.
    """

    slot: int
    tested: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True)
class Episode:
    """Documents that share a batch for some rounds, each begun somewhere in its middle.

    ``prefixes[slot]`` was generated before; ``rounds[i]`` has a move for each slot that still runs.
    Round 0 tests nothing, since nothing was drafted before.
    """

    documents: tuple[Document, ...]
    prefixes: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[Move, ...], ...]


def documents(
    folder: Path, backend: GrammarBackend, tokenizer: tokenizers.Tokenizer, *, count: int,
    shortest: int, seed: int,
) -> Iterator[Document]:  # fmt: skip
    """Up to ``count`` valid instances of at least ``shortest`` tokens, each of another schema.

    Schemas that the backend cannot enforce, and those whose instance it takes only in another
    spelling, are passed over.
    """
    rng = np.random.default_rng(seed)
    rows = [row for row in rows_of(folder) if row["valid"]]
    stop = backend.vocabulary.stop_ids[0]
    found = 0
    name = "xgrammar" if backend.name == "XGrammar" else "llguidance"
    with closing(GrammarService(backend.vocabulary, name, threads=_AHEAD)) as service:
        order = (rows[index] for index in rng.permutation(len(rows)).tolist())
        long = (row for row in order if len(_longest(row, tokenizer)) >= shortest)
        waiting = deque((row, _submit(service, name, row)) for row in islice(long, _AHEAD))
        while waiting and found < count:
            row, future = waiting.popleft()
            waiting.extend((row, _submit(service, name, row)) for row in islice(long, 1))
            try:
                compiled = future.result()
            except GraftError:
                continue
            tokens = (*_longest(row, tokenizer), stop)
            matcher = compiled.backend.matcher(compiled)
            if all(matcher.accept(token) for token in tokens):
                found += 1
                yield Document(compiled, tokens)


def _longest(row: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> list[int]:
    """The longest valid instance of a schema, as tokens."""
    texts = [json.dumps(value, ensure_ascii=False) for value in row["valid"]]
    return max((tokenizer.encode(t, add_special_tokens=False).ids for t in texts), key=len)


def _submit(service: GrammarService, name: str, row: dict[str, Any]) -> Future[CompiledGrammar]:
    """Compile a schema as it stands: a router's rewriting is not what is measured."""
    try:
        spec = GrammarSpec.json_schema(row["schema"], backend="xgrammar")
        return service.submit(replace(spec, backend=name))
    except GraftError as error:
        refused: Future[CompiledGrammar] = Future()
        refused.set_exception(error)
        return refused


def record(
    found: Sequence[Document], *, slots: int, rounds: int, draft_length: int, wrong: float,
    rng: np.random.Generator,
) -> Episode:  # fmt: skip
    """Draw an episode of different documents, if there are as many as slots.

    ``wrong`` is the probability that a draft is not the document's token.
    """
    picks = rng.choice(len(found), slots, replace=len(found) < slots)
    chosen = tuple(found[int(i)] for i in picks)
    reach = (rounds + 1) * (draft_length + 1)
    starts = [
        int(rng.integers(1, max(len(d.tokens) - reach, len(d.tokens) // 2) + 1)) for d in chosen
    ]
    prefixes = tuple(d.tokens[:start] for d, start in zip(chosen, starts, strict=True))
    players = [
        _Player(slot, document, prefix, draft_length, wrong, rng)
        for slot, (document, prefix) in enumerate(zip(chosen, prefixes, strict=True))
    ]
    played: list[tuple[Move, ...]] = []
    for _ in range(rounds):
        played.append(tuple(player.move() for player in players if not player.ended))
    return Episode(chosen, prefixes, tuple(played))


class _Player:
    """One slot of an episode while it is being drawn."""

    def __init__(self, slot: int, document: Document, prefix: Sequence[int], length: int,
                 wrong: float, rng: np.random.Generator):  # fmt: skip
        self.slot, self.ended = slot, False
        self._truth, self._at = document.tokens, len(prefix)
        self._stop = document.tokens[-1]
        self._length, self._wrong, self._rng = length, wrong, rng
        self._matcher: Matcher = document.compiled.backend.matcher(document.compiled)
        self._drafts: tuple[int, ...] = ()
        _take(self._matcher, prefix)

    def move(self) -> Move:
        tested, truth = self._drafts, self._truth[self._at :]
        accepted = 0
        while accepted < len(tested) and tested[accepted] == truth[accepted]:
            accepted += 1
        stopped = accepted > 0 and tested[accepted - 1] == self._stop
        tokens = truth[: accepted if stopped else accepted + 1]
        _take(self._matcher, tokens)
        self._at += len(tokens)
        self.ended = tokens[-1] == self._stop
        self._drafts = () if self.ended else tuple(self._draft(self._truth[self._at :]))
        return Move(self.slot, tested, accepted, tokens, self._drafts)

    def _draft(self, truth: Sequence[int]) -> Iterator[int]:
        row = np.zeros((self._matcher.size + 31) // 32, np.int32)
        taken = 0
        for likely in (*truth, *[self._stop] * self._length)[: self._length]:
            if not self._matcher.fill(row):
                row[:] = -1
            token = likely
            if self._rng.random() < self._wrong or not _is_set(row, likely):
                token = _other(row, likely, self._rng)
            yield token
            _take(self._matcher, (token,))
            taken += 1
            if token == self._stop:
                break
        self._matcher.rollback(taken)


def _is_set(row: np.ndarray, token: Any) -> Any:
    return row[token >> 5] >> (token & 31) & 1 != 0


def _other(row: np.ndarray, likely: int, rng: np.random.Generator) -> int:
    """Any legal token but ``likely``, all as probable; ``likely`` if it is the only one.

    Of random ids the first that is legal; where few are, all legal ones are listed.
    """
    ids = rng.integers(0, 32 * len(row), 64)
    hits = ids[_is_set(row, ids) & (ids != likely)]
    if len(hits):
        return int(hits[0])
    used = np.flatnonzero(row)
    bits = np.unpackbits(row[used].view(np.uint8), bitorder="little")
    legal = (used[:, None] * 32 + np.arange(32)).ravel()[bits.astype(bool)]
    others = legal[legal != likely]
    return int(rng.choice(others)) if len(others) else likely


def _take(matcher: Any, tokens: Sequence[int]) -> None:
    for token in tokens:
        if not matcher.accept(token):
            raise GraftError(f"grammar rounds: the matcher refuses token {token} of its document")
