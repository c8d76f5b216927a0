"""Canonical spelling: the native encoder against ``tokenizers``, and LLGuidance's masks with it."""

from __future__ import annotations

import functools
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from engine_util import TARGET, demo_engine, mixed_requests

from graft.grammar import GrammarError, GrammarSpec, LLGuidanceBackend, StructuralTag, Vocabulary
from graft.grammar.canonical import make_encoder

TOKENIZER = TARGET / "tokenizer.json"
SHARED = ("deepseek-128k.json.gz", "cl100k-llama3-like.json.gz")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "nature": {"type": "string"},
        "age": {"type": "integer"},
        "colour": {"enum": ["red", "reddish", "green"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAGS = [
    StructuralTag.of("<f=a>", {"type": "integer"}, "</f>"),
    StructuralTag.of("<f=b>", {"enum": ["abc", "ab"]}, "</f>"),
]
SPECS = {
    "schema": GrammarSpec.json_schema(SCHEMA),
    "spaced": GrammarSpec.json_schema(SCHEMA, whitespace="any"),
    "choice": GrammarSpec.choice(["alpha beta", "alphabet", "gamma d\u00e9lta 1234", "\u65e5 x"]),
    "regex": GrammarSpec.regex("(hello|help)+ (world|wonder)[0-9]*"),
    "lark": GrammarSpec.lark('start: "begin " item+ " the end"\nitem: "value=" /[0-9]+/ ";"'),
    "tags": GrammarSpec.structural_tag(TAGS, ["<f"]),
    "marked": GrammarSpec.choice(["alpha beta", "gamma"]).after("###"),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(TOKENIZER, 2050, [0, 3])


def texts(count: int) -> list[str]:
    """Prose, code, JSON, and random characters of all scripts with much white space between."""
    chosen = random.Random(5)
    ranges = [(32, 0x250), (0x370, 0x600), (0x3040, 0x3100), (0x4E00, 0x4F00), (0xE000, 0x20000)]
    odd = "\n\r\t \u00a0\u1680\u2003\u2028\u3000\u0085\u001c\ufeff\u200d\u0300\u017f\U0001f600"
    words = ["'s", "'LL", "I'M", "don't", " ", "  ", "\n\n", "\r\n", "1234567", "foo", " Bar", "-"]
    found = [path.read_text() for path in Path(__file__).parent.glob("test_grammar_*.py")]
    for _ in range(count):
        kind = chosen.random()
        length = chosen.randint(1, 40)
        if kind < 0.3:
            found.append("".join(chosen.choice(words) for _ in range(length)))
        else:
            pick = [
                chosen.choice(odd) if chosen.random() < 0.2 else chr(chosen.randrange(*r))
                for r in chosen.choices(ranges, k=length)
            ]
            found.append("".join(pick))
    return found


def load(name: str, shared_data: Path) -> str:
    """The text of a ``tokenizer.json``: the demo model's, or one of the shared data."""
    if name == "demo":
        return TOKENIZER.read_text()
    path = shared_data / "tokenizers" / name
    if not path.exists():
        pytest.skip(f"no tokenizer at {path}")
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize(
    "name", ["demo", *(pytest.param(name, marks=pytest.mark.full) for name in SHARED)]
)
def test_the_encoder_gives_the_tokens_of_the_tokenizer(name, request):
    """On thousands of texts the native encoder gives what Hugging Face's tokenizer gives."""
    text = load(name, None if name == "demo" else request.getfixturevalue("shared_data"))
    stock, description = tokenizers.Tokenizer.from_str(text), json.loads(text)
    added = [token["content"] for token in description["added_tokens"]]
    size = stock.get_vocab_size() + 500
    encoder = make_encoder(description, Vocabulary.from_tokenizer(stock, size, [size - 1]).tokens)
    compared = 0
    for sample in texts(2000):
        if not any(token in sample for token in added):
            expected = stock.encode(sample, add_special_tokens=False).ids
            assert encoder.encode(sample.encode()) == expected, sample
            compared += 1
    assert compared > 1900
    assert encoder.encode(b"") == []
    assert encoder.encode(b"a\xff\xfeb\xe6\x97")  # bytes that are no text are encoded all the same


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d: d["model"].update(type="Unigram"), "model 'Unigram'"),
        (lambda d: d["model"].update(byte_fallback=True), "model byte_fallback True"),
        (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
        (lambda d: d.update(normalizer={"type": "NFC"}), "normalizer 'NFC'"),
        (lambda d: d.update(pre_tokenizer=None), "pre-tokenizer None"),
        (lambda d: d.update(pre_tokenizer={"type": "Metaspace"}), "pre-tokenizer 'Metaspace'"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "Removed"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "prefix"),
        *[
            (lambda d, p=p: d["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": p}), "")
            for p in ("(a|b)+", "a(?=b)", "a+?", r"(a)\1", "a*(b|c)", "[[:alpha:]]", "a)", "(a",
                      ".", r"\p{Nonsense}", "^a", "[a")
        ],
        (lambda d: d["model"]["merges"].append(["a", "no token at all"]), "merges"),
    ],
)  # fmt: skip
def test_tokenizers_of_another_kind_are_refused_by_name(change, said):
    """What the encoder does not know is named; it never spells a text in another way."""
    description = json.loads(TOKENIZER.read_text())
    tokens = Vocabulary.from_tokenizer(TOKENIZER, 2050, [0]).tokens
    change(description)
    with pytest.raises(GrammarError, match="tokenizer: ") as caught:
        make_encoder(description, tokens)
    assert said in str(caught.value)


def test_a_vocabulary_without_a_tokenizer_has_no_canonical_spelling():
    """Asked for canonical spelling, a backend refuses a vocabulary of bare bytes."""
    with pytest.raises(GrammarError, match="canonical spelling needs the tokenizer"):
        LLGuidanceBackend(Vocabulary([b"a", b""], 2, [1]), canonical=True)


def test_forced_text_is_spelled_as_the_model_spells_it(vocabulary):
    """One token is legal at each place of a forced text: the tokenizer's; without it, several."""
    text = "the grammar forces 12345 words"
    spec = GrammarSpec.choice([text])
    for canonical in (True, False):
        backend = LLGuidanceBackend(vocabulary, canonical=canonical)
        matcher = backend.matcher(backend.compile(spec))
        several = 0
        for token in vocabulary.encoder.encode(text.encode()):
            legal = matcher.legal().tolist()
            assert token in legal
            several += len(legal) > 1
            assert matcher.accept(token)
        assert (several == 0) == canonical
        assert matcher.accept(3)


def bits(row: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:size].astype(bool)


def play(vocabulary: Vocabulary, streams: int, seed: int) -> tuple[int, int]:
    """Random streams with rollbacks and tokens that only another spelling allows."""
    native = LLGuidanceBackend(vocabulary, canonical=True)
    stock = LLGuidanceBackend(vocabulary, canonical=True, native=False)
    free = LLGuidanceBackend(vocabulary)
    rng = np.random.default_rng(seed)
    rows = np.zeros((4, vocabulary.words), np.int32)
    steps = narrowed = 0
    for spec in SPECS.values():
        grammars = [backend.compile(spec) for backend in (native, stock, free)]
        for _ in range(streams // len(SPECS)):
            one, two = (g.backend.matcher(g) for g in grammars[:2])
            history: list[int] = []
            for _ in range(int(rng.integers(5, 30))):
                if one.is_terminated():
                    break
                replayed = [g.backend.matcher(g) for g in (grammars[0], grammars[2])]
                assert all(m.accept(token) for token in history for m in replayed)
                for matcher, row in zip((one, two, *replayed), rows, strict=True):
                    if not matcher.fill(row):
                        row[:] = -1
                np.testing.assert_array_equal(rows[0], rows[1])  # the stock matcher
                np.testing.assert_array_equal(rows[0], rows[2])  # a new one with the same tokens
                legal, any_spelling = bits(rows[0], vocabulary.size), bits(rows[3], vocabulary.size)
                assert not (legal & ~any_spelling).any() and legal.any()
                other = np.flatnonzero(any_spelling & ~legal)
                if len(other):
                    narrowed += 1
                    token = int(rng.choice(other))
                    assert not one.accept(token) and not two.accept(token)
                history.append(int(rng.choice(np.flatnonzero(legal))))
                assert one.accept(history[-1]) and two.accept(history[-1])
                steps += 1
                if rng.random() < 0.2:
                    back = int(rng.integers(1, len(history) + 1)) if rng.random() < 0.3 else 1
                    one.rollback(back)
                    two.rollback(back)
                    del history[-back:]
    return steps, narrowed


def test_canonical_masks_are_those_of_the_stock_matcher(vocabulary):
    """Native, stock and new matchers agree at every step; a mask only ever loses spellings."""
    steps, narrowed = play(vocabulary, 21, seed=1)
    assert steps > 150 and narrowed > 15


@pytest.mark.full
def test_a_thousand_canonical_streams(vocabulary):
    """The same over 1,000 streams."""
    steps, narrowed = play(vocabulary, 1000, seed=2)
    assert steps > 8000 and narrowed > 800


def test_canonical_spelling_serves_the_engine():
    """Outputs obey their grammars, the same on the native and the Python transport."""
    backend = functools.partial(LLGuidanceBackend, canonical=True)
    outputs = []
    for transport in ("native", "python"):
        engine = demo_engine(
            max_batch_size=4, grammar_backend=backend, grammar_transport=transport
        )  # fmt: skip
        try:
            outputs.append([o.tokens for o in engine.generate(mixed_requests(4, seed=3))])
            assert engine._parts.decoder.counters()["desyncs"] == 0
        finally:
            engine.close()
    assert outputs[0] == outputs[1] and all(outputs[0])
