"""grammar: a matcher driven by hand, as a decoding loop of your own would.

A row of the mask says which tokens may come next; `accept` moves on, `rollback` moves back.
"""

from __future__ import annotations

import numpy as np

from graft.grammar import GrammarSpec, Vocabulary, make_backend
from graft.models.tokenizer import Tokenizer
from graft.tools.demo_model import demo_model


def main() -> None:
    """A regular expression, walked token by token: always the first of the shortest legal ones."""
    target, _ = demo_model()
    tokenizer = Tokenizer(target)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, 2048, tokenizer.stop_ids)
    backend = make_backend("llguidance", vocabulary)
    matcher = backend.compile(GrammarSpec.regex("(yes|no), [0-9]{2}")).matcher()
    row = np.zeros(vocabulary.words, np.int32)
    text = b""
    while not matcher.is_terminated():
        matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        legal = [(vocabulary.tokens[token], int(token)) for token in np.flatnonzero(bits)]
        piece, token = min(legal, key=lambda one: (len(one[0]), one))
        print(f"{text.decode():<8} {len(legal):>3} legal, taken: {piece!r}")
        text += b"" if token in vocabulary.stop_ids else piece
        matcher.accept(token)
    matcher.rollback(2)  # the stop token and the last digit
    matcher.accept(vocabulary.tokens.index(b"7"))
    matcher.fill(row)
    print(text[:-1].decode() + "7", "| only the stop token is legal:", int((row != 0).sum()) == 1)


if __name__ == "__main__":
    main()
