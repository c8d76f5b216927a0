"""Replace XGrammar in a decoding loop with the classes of graft.grammar.xgrammar_api.

The loop below is the loop of an engine that was written for XGrammar: it fills a batch of token
bitmasks, masks the logits, selects one token per output and advances the matchers.
"""

from __future__ import annotations

import numpy as np

from graft.grammar import Vocabulary
from graft.grammar.xgrammar_api import (
    BatchGrammarMatcher,
    GrammarCompiler,
    GrammarMatcher,
    allocate_token_bitmask,
)
from graft.models.tokenizer import Tokenizer
from graft.tools.demo_model import demo_model

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}


def main() -> None:
    """Generate three JSON objects from random logits and print them."""
    target, _ = demo_model()
    tokenizer = Tokenizer(target)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, 2048, tokenizer.stop_ids)
    compiler = GrammarCompiler(vocabulary)
    grammar = compiler.compile_json_schema(SCHEMA, any_whitespace=False)
    matchers = [GrammarMatcher(grammar) for _ in range(3)]
    texts = [matcher.find_jump_forward_string() for matcher in matchers]
    for matcher, text in zip(matchers, texts, strict=True):
        matcher.accept_string(text)
    print("forced start:", texts[0])

    batch = BatchGrammarMatcher()
    bitmask = allocate_token_bitmask(len(matchers), vocabulary.size)
    generator = np.random.default_rng(1)
    while not all(matcher.is_terminated() for matcher in matchers):
        running = [row for row, matcher in enumerate(matchers) if not matcher.is_terminated()]
        batch.batch_fill_next_token_bitmask([matchers[row] for row in running], bitmask, running)
        logits = generator.standard_normal((len(matchers), vocabulary.size))
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
        logits[bits[:, : vocabulary.size] == 0] = -np.inf
        for row in running:
            token = int(logits[row].argmax())
            matchers[row].accept_token(token)
            if token not in vocabulary.stop_ids:
                texts[row] += vocabulary.tokens[token].decode()
    compiler.close()
    for text in texts:
        print(text)


if __name__ == "__main__":
    main()
