"""Use a matcher of graft.grammar directly, as a custom decoding loop would.

A matcher is the parsing state of one output. Its method `fill` writes the bitmask of the legal next
tokens, `accept` advances the matcher by a token, and `rollback` undoes the last tokens.
"""

from __future__ import annotations

import numpy as np

from graft.grammar import GrammarSpec, Vocabulary, make_backend
from graft.models.tokenizer import Tokenizer
from graft.tools.demo_model import demo_model


def main() -> None:
    """Generate a text that matches a regular expression.

    Each step selects the shortest legal token. Of several tokens with this length, it selects the
    first one in byte order.
    """
    target, _ = demo_model()
    tokenizer = Tokenizer(target)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, 2048, tokenizer.stop_ids)
    backend = make_backend("llguidance", vocabulary)
    matcher = backend.compile(GrammarSpec.regex("(yes|no), [0-9]{2}")).matcher()
    mask = np.zeros(vocabulary.words, np.int32)
    text = b""
    while not matcher.is_terminated():
        matcher.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        legal = [(vocabulary.tokens[token], int(token)) for token in np.flatnonzero(bits)]
        piece, token = min(legal, key=lambda entry: (len(entry[0]), entry))
        print(f"{text.decode():<8} {len(legal):>3} legal tokens, chosen: {piece!r}")
        if token not in vocabulary.stop_ids:
            text += piece
        matcher.accept(token)
    matcher.rollback(2)  # undo the stop token and the last digit
    matcher.accept(vocabulary.tokens.index(b"7"))
    matcher.fill(mask)
    only_stop = int((mask != 0).sum()) == 1
    print(text[:-1].decode() + "7", "| only the stop token is legal:", only_stop)


if __name__ == "__main__":
    main()
