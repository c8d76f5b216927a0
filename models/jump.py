"""Jump-forward: text that the grammar forces is appended outright, as the tokenizer spells it.

After each token that a guided request samples, its *follower*, a matcher of the host's own, is
asked what text is forced. That text is tokenized together with what stands before it, and the
request goes on behind it. Its matcher, token history and both key-value caches change as one: see
`Scheduler` and `Seating.rewind`.

Exactness: the text is what it would be, the tokens are not always. The model might have spelled the
same text in other tokens, and what it samples afterwards depends on them. Only where every appended
token was the one legal id are outputs distributed as without jumps; `Output.exact` says so.

A jump is a function of the tokens before it. Tokens that a round has sampled behind the place of a
jump are dropped, unless they are the appended ones; so outputs of greedy and coupled requests do
not depend on drafts, rounds in flight, or the batch.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.grammar.forced import LongerTokens, a_choice, all_legal, few_ids
from graft.grammar.matcher import Matcher
from graft.grammar.vocabulary import Vocabulary
from graft.models.running import Running, TextDecoder

#: Most tokens that are rewritten before, and left out at the end of, forced text.
SEAM = 4
#: Tokens before forced text that are tokenized with it.
CONTEXT = 16


@dataclass(frozen=True)
class Jump:
    """What a request's output becomes.

    Attributes
    ----------
    tokens, text : the whole output.
    kept : how many of its tokens, from the first, are those it had; the others are new.
    decoder, matcher : have taken the tokens; the matcher is for the guided decoder.
    """

    tokens: list[int]
    text: str
    kept: int
    decoder: TextDecoder
    matcher: Matcher | None = None


class JumpForward:
    """Finds the jumps of an engine's requests.

    At the left seam up to 4 tokens of the output are rewritten, the fewest that let the tokenizer's
    own spelling of the text begin there; of the prompt none. At the right seam up to 4 tokens are
    left to be sampled: those with which a legal token begins that goes on after the forced text.

    Parameters
    ----------
    vocabulary : bytes of each id.
    encode : token ids of a text, with nothing added around it.
    decoder : makes decoders for one text each.
    least : tokens that a jump must append; before the first token, where it costs nothing, one.

    Raises
    ------
    OptionError
        When `least` is below 1.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], Sequence[int]],
        decoder: Callable[[], TextDecoder],
        least: int,
    ):
        if least < 1:
            raise OptionError(f"jump_least must be at least 1, got {least}")
        self._vocabulary, self._encode, self._decoder = vocabulary, encode, decoder
        self._least, self._longer = least, LongerTokens(vocabulary)

    def require_bytes(self, text: str) -> None:
        """Refuse a tokenizer that changes the bytes of a text.

        Raises
        ------
        OptionError
            Naming the text: what is spelled would not be what the grammar forces.
        """
        if not self._starts(text.encode())[1]:
            raise OptionError(f"jump_forward: the tokenizer does not keep the bytes of {text!r}")

    def start(self, running: Running) -> Jump | None:
        """The jump that a request begins with; makes its follower."""
        running.follower = running.make_matcher()
        return _with_matcher(running, self._find(running, list(running.output.tokens)))

    def follow(
        self, running: Running, tokens: Sequence[int], ended: bool
    ) -> tuple[int, Jump | None]:
        """Advance the follower by a round's tokens, up to the first place of a jump.

        Parameters
        ----------
        ended : whether the last of them ended the request.

        Returns
        -------
        tuple
            How many of the tokens stand, and the jump that follows them, if any. The follower
            stands at the end of it all.

        Raises
        ------
        GrammarError
            When the grammar refuses a token.
        Exception
            Whatever backend or tokenizer raise.
        """
        history, at = list(running.output.tokens), 0
        while at < len(tokens):
            _accept(running, tokens[at : at + 1])
            history.append(tokens[at])
            at += 1
            jump = None if ended and at == len(tokens) else self._find(running, history)
            if jump is None:
                continue
            appended, sampled = jump.tokens[len(history) :], list(tokens[at:])
            if jump.kept < len(history) or appended[: len(sampled)] != sampled[: len(appended)]:
                return at, _with_matcher(running, jump)
            # The round has sampled the same tokens, or as many of them as it could.
            history, at = jump.tokens, at + len(appended)
            if at > len(tokens):
                return len(tokens), _with_matcher(running, jump)
        return at, None

    def _find(self, running: Running, history: list[int]) -> Jump | None:
        """The jump from `history`, where the follower stands; it then stands behind the jump."""
        matcher, room = running.follower, running.max_tokens - len(history)
        least = self._least if history else 1
        if matcher is None or room < least or matcher.is_terminated():
            return None
        forced = self._forced(running, matcher)
        if len(forced) < 2:
            return None
        before = [*running.prompt[-CONTEXT:], *history[-CONTEXT:]][-CONTEXT:]
        for back, spelled in self._spellings(before, forced, min(len(history), SEAM)):
            new, kept = spelled[: room + back], len(history) - back
            matcher.rollback(back)
            rows = self._advance(matcher, new)
            if len(rows) == len(new) and not set(new) & set(running.stop_ids):
                break
            matcher.rollback(len(rows))
            _accept(running, history[kept:])
        else:
            return None
        texts = [self._vocabulary.tokens[token] for token in new]
        drop = self._open_end(texts, rows) if len(new) < room + back else 0
        new = new[: len(new) - drop]
        jump = self._jump(running, history[:kept], new)
        known = b"".join(self._vocabulary.tokens[token] for token in history[kept:])
        longer = len(b"".join(texts[: len(new)])) > len(known)
        if jump is None or not longer or len(new) - back < least:
            matcher.rollback(len(rows))
            _accept(running, history[kept:])
            return None
        matcher.rollback(drop)
        running.output.exact &= not back and all(_single(row) for row in rows[: len(new)])
        return jump

    def _forced(self, running: Running, matcher: Matcher) -> bytes:
        """The forced text; where the same two tokens are a choice again, no mask row is filled."""
        if running.choice and all_legal(matcher, running.choice):
            return b""
        forced = matcher.forced_text()
        running.choice = () if forced else a_choice(matcher)
        return forced

    def _jump(self, running: Running, kept: list[int], new: list[int]) -> Jump | None:
        """The output's tokens as text; None where they do not begin with the text there is."""
        decoder = self._decoder()
        text = decoder.push(kept)
        text += "".join(decoder.push([token]) for token in new)
        if not text.startswith(running.output.text):
            return None
        return Jump([*kept, *new], text, len(kept), decoder)

    def _advance(self, matcher: Matcher, tokens: Sequence[int]) -> list[np.ndarray]:
        """The mask rows of the tokens that the matcher has taken, up to the first illegal one."""
        rows: list[np.ndarray] = []
        for token in tokens:
            row = np.zeros(self._vocabulary.words, np.int32)
            if not matcher.fill(row):
                row[:] = -1
            if not matcher.accept(token):
                break
            rows.append(row)
        return rows

    def _open_end(self, texts: list[bytes], rows: list[np.ndarray]) -> int:
        """How many tokens at the end begin a legal token that is longer than they are."""
        for drop in range(min(SEAM, len(texts)), 0, -1):
            if self._longer.legal(b"".join(texts[-drop:]), rows[-drop]):
                return drop
        return 0

    def _spellings(
        self, before: Sequence[int], forced: bytes, movable: int
    ) -> Iterator[tuple[int, list[int]]]:
        """How many of the tokens `before` are rewritten, and the ids that replace them.

        First as the tokenizer spells forced text behind what stands before it, then by itself.
        """
        context: list[bytes] = []
        for token in reversed(before):
            if not self._text_of(token):
                break  # what is no text ends a text
            context.insert(0, self._text_of(token))
        while context and context[0][0] & 0xC0 == 0x80:
            del context[0]  # begins within a character
        for texts in (context, []) if context else ([],):
            starts, ids = self._starts(b"".join(texts) + forced)
            for back in range(min(movable, len(texts)) + 1):
                place = len(b"".join(texts[: len(texts) - back]))
                if place in starts:
                    yield back, ids[starts[place] :]
                    break

    def _starts(self, data: bytes) -> tuple[dict[int, int], list[int]]:
        """Where tokens begin in a text, as byte: index, and the tokens; empty if it cannot be had.

        An unfinished character at the end is left out.
        """
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data)
        except UnicodeDecodeError:
            return {}, []
        ids = list(self._encode(text))
        pieces = [self._text_of(token) for token in ids]
        data, spelled = text.encode(), b"".join(pieces)
        at = len(data) - len(spelled)  # below 0 for tokenizers that put a space before a text
        if not spelled.endswith(data):
            return {}, []
        starts = {}
        for index, piece in enumerate(pieces):
            starts[at] = index
            at += len(piece)
        return starts, ids

    def _text_of(self, token: int) -> bytes:
        tokens = self._vocabulary.tokens
        return tokens[token] if token < len(tokens) else b""


def _with_matcher(running: Running, jump: Jump | None) -> Jump | None:
    return None if jump is None else replace(jump, matcher=running.make_matcher(jump.tokens))


def _accept(running: Running, tokens: Sequence[int]) -> None:
    for token in tokens:
        if running.follower is None or not running.follower.accept(token):
            raise GrammarError(f"the grammar refused token {token}, which it had accepted before")


def _single(row: np.ndarray) -> bool:
    return few_ids(row, 1) is not None
