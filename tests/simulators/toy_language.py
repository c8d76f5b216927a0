"""A simulated language model with grammars and text, and the oracle of its outputs.

`decode_sequentially` decodes a request token by token. `interleaving` compares the outputs of the
engine's host code with it.

The model's next token is a hash of everything it may depend on: the preceding tokens, the seed of
the request and the ids that the grammar allows. The output of a request is therefore a pure
function of the request. If the engine confuses the tokens, pages, masks or seeds of two requests,
an output changes.
"""

import functools
from collections.abc import Sequence

import numpy as np
from reference_round import bits, pack_bits
from round_simulator import mix

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.grammar.vocabulary import Vocabulary
from graft.models.engine.request_state import RequestState

VOCAB = 40  # not a multiple of 32
STOPS = (38, 39)
ALL_IDS = tuple(range(VOCAB))
_MASK64 = (1 << 64) - 1


@functools.lru_cache(1 << 16)
def choose(context: int, seed: int, legal: tuple[int, ...]) -> int:
    """Return the target model's next token.

    Parameters
    ----------
    context
        Hash of the preceding tokens, from `context_of`.
    seed
        Seed of the request.
    legal
        Ids that the grammar allows.
    """
    return min(legal, key=lambda token: mix(context, seed, token))


def context_of(tokens: Sequence[int]) -> int:
    """Return a hash of a token sequence. It represents the target's state after these tokens."""
    return hash(tuple(tokens)) & _MASK64


@functools.lru_cache(1 << 16)
def legal_ids(grammar: int, state: int) -> tuple[int, ...]:
    """Return the ids that a grammar allows in a state.

    The result is empty in a dead end, and `ALL_IDS` if the state has no constraint.
    """
    h = mix(grammar, state)
    if h % 61 == 0:
        return ()
    if h % 11 == 0:
        return ALL_IDS
    if h % 7 < 3:
        return ((h >> 8) % STOPS[0],)
    ids = [token for token in range(STOPS[0]) if mix(h, token) % 3 == 0]
    return (*ids, *STOPS) if h % 5 == 0 or not ids else tuple(ids)


@functools.lru_cache(1 << 16)
def mask_row(legal: tuple[int, ...]) -> np.ndarray:
    """Return the token bitmask of the ids, in int32 words."""
    return pack_bits(np.isin(ALL_IDS, legal))


@functools.lru_cache(1 << 16)
def row_ids(words: bytes) -> tuple[int, ...]:
    """Return the ids of a token bitmask, which is given as bytes."""
    return tuple(bits(np.frombuffer(words, np.int32)).tolist())


class ToyMatcher(Matcher):
    """Matcher whose states are hashes of the accepted tokens, kept on a stack for rollback."""

    def __init__(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]):
        super().__init__(compiled, stop_ids)
        self._grammar: int = compiled.native
        self._states = [0]
        self._ended = False
        self.is_automaton = compiled.automaton is not None

    def accept(self, token: int) -> bool:
        if self._ended or token not in legal_ids(self._grammar, self._states[-1]):
            return False
        self._states.append(mix(self._states[-1], token))
        self._ended = token in self.stop_ids
        return True

    def fill(self, row: np.ndarray) -> bool:
        self._require_not_terminated()
        legal = legal_ids(self._grammar, self._states[-1])
        if legal == ALL_IDS:
            return False
        row[:] = mask_row(legal)
        return True

    def rollback(self, tokens: int) -> None:
        assert tokens < len(self._states), "rollback beyond the first state"
        if tokens:
            del self._states[-tokens:]
            self._ended = False

    def is_terminated(self) -> bool:
        return self._ended


#: Vocabulary with one letter per id. The stop ids have no text.
TOY = Vocabulary([bytes([0x41 + i]) for i in range(STOPS[0])] + [b"", b""], VOCAB, STOPS)


class ToyBackend:
    """Grammar backend whose grammars are integers, the first argument of `legal_ids`."""

    name = "toy"
    vocabulary = TOY

    def compile(self, grammar: int) -> CompiledGrammar:
        return CompiledGrammar(self, GrammarSpec.regex("."), grammar, 0)

    def matcher(self, compiled: CompiledGrammar, stop_ids: tuple[int, ...]) -> ToyMatcher:
        return ToyMatcher(compiled, stop_ids)


class ToyText:
    """Incremental decoder of the simulated text.

    Half of the letters of the alphabet are held back until the next letter arrives, like a token
    that ends inside a UTF-8 character.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, ids: list[int]) -> str:
        text = self._held + b"".join(TOY.tokens[i] for i in ids).decode()
        self._held = text[-1:] if text and ord(text[-1]) % 2 else ""
        return text.removesuffix(self._held)


def decode_sequentially(
    state: RequestState, compiled: CompiledGrammar | None
) -> tuple[list[int], str]:
    """Decode a request token by token, without an engine. Return its tokens and finish reason."""
    tokens: list[int] = []
    matcher = None if compiled is None else compiled.matcher(state.stop_ids)
    text = ""
    decoder = ToyText()
    while True:
        legal = ALL_IDS if matcher is None else tuple(matcher.legal().tolist())
        if not legal:
            return tokens, "dead_end"
        token = choose(context_of([*state.prompt, *tokens]), state.output.seed, legal)
        tokens.append(token)
        assert matcher is None or matcher.accept(token)
        if token in state.stop_ids:
            return tokens, "stop"
        text += decoder.push([token])
        if any(stop in text for stop in state.request.stop):
            return tokens, "stop_string"
        if len(tokens) == state.max_tokens:
            return tokens, "length"
