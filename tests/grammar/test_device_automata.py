"""Automata on the device: their mask rows and stamps are those of the host's matchers."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from automaton_rig import AutomatonRig
from guide_util import oracle_row
from reference_round import NOT_READY, READY, bits, chain
from rule_matcher import RuleMatcher
from test_automata import (
    BACKEND,
    FIRST_BYTE,
    STOP,
    VOCABULARY,
    has_automaton,
    llguidance_matcher,
    real_schemas,
    table_of,
    visiting_texts,
)

from graft.grammar import GrammarSpec, LLGuidanceBackend, Vocabulary, resolve_spec
from graft.grammar.automaton import device as device_module
from graft.grammar.automaton.device import table_data
from graft.grammar.automaton.lower import lower
from graft.sampling.mode import DraftMode

SLOTS = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "beta", "al"]},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": GrammarSpec.regex("[0-9]{3}-(foo|bar)+"),
    "unicode": GrammarSpec.regex("[à-ü]+|\U0001f600"),
    "choice": GrammarSpec.choice(["alpha", "alphabet", "beta", '{"a": 1}']),
    "schema": GrammarSpec.json_schema(SCHEMA),
}


@pytest.fixture(params=[(1, 1), (64, 3)], ids=["block1", "block64"])
def shape(request):
    """Threads per block and blocks per row: as on the soft device, or several."""
    block, parts = request.param
    return {"block": block, "parts": parts}


@functools.cache
def compiled(spec):
    return BACKEND.compile(spec)


def byte_tokens(text):
    return [FIRST_BYTE + byte for byte in text]


@functools.cache
def rule_matcher(spec):
    return RuleMatcher(lower(resolve_spec(spec, "llguidance")))


@functools.cache
def rule_row(spec, text):
    """Return the mask row of a slow matcher after a text; None if the text is illegal."""
    matcher = rule_matcher(spec)
    node = matcher.after(text)
    following, ends = matcher.legal(node)
    if not following and not ends:
        return None
    row = np.zeros(32 * VOCABULARY.words, np.uint8)
    for token, spelled in enumerate(VOCABULARY.tokens):
        row[token] = bool(spelled) and matcher.is_prefix(spelled, node)
    row[STOP] = ends
    return np.packbits(row, bitorder="little").view(np.int32)


def oracle(spec, tokens):
    """Return the mask row after some tokens; None if a token is illegal or the last.

    It is LLGuidance's row. For JSON schemas, LLGuidance refuses most escapes, so the row is that of
    a slow matcher of the schema's rules.
    """
    if spec.kind == "json_schema":
        texts = [VOCABULARY.tokens[token] for token in tokens if token < len(VOCABULARY.tokens)]
        is_legal = len(texts) == len(tokens) and all(texts)
        return rule_row(spec, b"".join(texts)) if is_legal else None
    return oracle_row(functools.partial(llguidance_matcher, compiled(spec)), tokens)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_device_automaton_has_rows_of_llguidance_in_every_state(device, stream, shape, kind):
    spec = GRAMMARS[kind]
    grammar = compiled(spec)
    texts = visiting_texts(table_of(spec), 160)
    rig = AutomatonRig(device, stream, VOCABULARY, SLOTS, DraftMode(drafts=0), **shape)
    for epoch, first in enumerate(range(0, len(texts), SLOTS), 1):
        part = texts[first : first + SLOTS]
        for slot, text in enumerate(part):
            matcher = grammar.matcher(tokens=byte_tokens(text))
            assert rig.join(slot, epoch, matcher, position=len(text))
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 1, copied=True)
        masks, stamps = rig.rows()
        for slot, text in enumerate(part):
            expected = oracle(spec, byte_tokens(text))
            np.testing.assert_array_equal(masks[0, slot], expected, repr(text))
            assert stamps[slot, 0].tolist() == (READY, epoch, len(text), 0)


def host_row(spec, tokens):
    """Return the mask row of the host's matcher after some tokens."""
    row = np.zeros(VOCABULARY.words, np.int32)
    assert compiled(spec).matcher(tokens=tokens).fill(row)
    return row


def random_tree(generator, spec, history, count, is_chain):
    """Return a tree of drafts, most of which are legal."""
    tree = chain(0)
    for j in range(count):
        parent = j if is_chain else generator.randrange(j + 1)
        row = oracle(spec, [*history, *tree.path(parent)])
        choices = [5, STOP]
        if row is not None and generator.random() < 0.9:
            choices = bits(row).tolist()
        tree = tree.grow(parent, generator.choice(choices or [STOP]))
    return tree


def check_row(masks, stamps, slot, j, spec, tokens, position, epoch=1, row_of=oracle):
    """Compare a row with the oracle; a row without legal prefix must not be ready."""
    expected = row_of(spec, tokens)
    if expected is None:
        assert stamps[slot, j]["state"] == NOT_READY
        return
    np.testing.assert_array_equal(masks[j, slot], expected, repr(tokens))
    assert stamps[slot, j].tolist() == (READY, epoch, position, 0)


def committed_tokens(generator, spec, history, tree):
    """Return a path of legal drafts and one more legal token, as verification commits them."""
    tokens = []
    node = 0
    while True:
        row = oracle(spec, history + tokens)
        if row is None:
            return tokens
        children = [
            child
            for child in tree.children(node)
            if oracle(spec, [*history, *tokens, tree.token[child]]) is not None
        ]
        if not children or generator.random() < 0.3:
            legal = [token for token in bits(row).tolist() if token != STOP]
            return [*tokens, generator.choice(legal)] if legal else tokens
        node = generator.choice(children)
        tokens.append(tree.token[node])


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.full("block1-tree", "block64-chain")
def test_device_automaton_follows_commits_and_drafts(device, stream, shape, is_chain):
    """In random rounds, some without some requests, the rows of random drafts are correct."""
    generator = random.Random(int(is_chain))
    kinds = [*GRAMMARS] * 2
    mode = DraftMode.chain(4, "none") if is_chain else DraftMode(drafts=4, levels=4, branch=2)
    rig = AutomatonRig(device, stream, VOCABULARY, len(kinds), mode, **shape)
    specs = [GRAMMARS[kind] for kind in kinds]
    for slot, spec in enumerate(specs):
        assert rig.join(slot, 1, compiled(spec).matcher())
    history = [[] for _ in specs]
    trees = [chain(0) for _ in specs]
    checked = 0
    for number in range(1, 13):
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 5, copied=number % 3 == 0)
        masks, stamps = rig.rows()
        for slot, spec in enumerate(specs):
            for j in range(len(trees[slot].token)):
                tokens = [*history[slot], *trees[slot].path(j)]
                check_row(masks, stamps, slot, j, spec, tokens, 10 + len(tokens))
                checked += 1
            late = generator.random() < 0.2
            tokens = committed_tokens(generator, spec, history[slot], trees[slot])
            rig.write_commit(slot, [] if late else tokens)
            if not late and tokens:
                history[slot] += tokens
                trees[slot] = chain(0)
        if number % 2:  # otherwise the next open step applies the commits
            rig.automata.add_commit(rig.lane, rig.row_slot, fill=False)
        for slot, spec in enumerate(specs):
            if len(trees[slot].token) == 1:
                trees[slot] = random_tree(generator, spec, history[slot], 4, is_chain)
                rig.write_drafts(slot, trees[slot])
    assert checked > 300


def test_device_automaton_fills_rows_while_a_chain_is_drafted(device, stream, shape):
    """Row j is filled after draft j, and the next open step fills only the row that is missing."""
    generator = random.Random(3)
    rig = AutomatonRig(device, stream, VOCABULARY, len(GRAMMARS), DraftMode.chain(3), **shape)
    specs = list(GRAMMARS.values())
    for slot, spec in enumerate(specs):
        assert rig.join(slot, 1, compiled(spec).matcher())
    history = [[] for _ in specs]
    for _ in range(7):
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 4, copied=False)
        for slot, spec in enumerate(specs):
            tokens = committed_tokens(generator, spec, history[slot], chain(0))
            rig.write_commit(slot, tokens)
            history[slot] += tokens
        rig.automata.add_commit(rig.lane, rig.row_slot, fill=True)
        drafts = [random_tree(generator, spec, history[s], 3, True) for s, spec in enumerate(specs)]
        for j in (1, 2, 3):
            for slot, tree in enumerate(drafts):
                rig.write_drafts(slot, tree.first(j))
            if j < 3:
                rig.automata.add_draft(rig.lane, rig.row_slot, j)
        check_chain(rig, specs, history, drafts, 3)
        rig.exchange.device_masks.fill(0)
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 4, copied=False)
        check_chain(rig, specs, history, drafts, 4, first=3)
        assert not rig.rows()[0][:3].any()  # these rows were filled before
        for slot in range(len(specs)):
            rig.write_commit(slot, [])
        rig.automata.add_commit(rig.lane, rig.row_slot, fill=True)


def test_device_automaton_fills_rows_again_that_may_be_overwritten(device, stream, shape):
    """The copies of other rounds, and of this round, overwrite the rows filled while drafting."""
    rig = AutomatonRig(device, stream, VOCABULARY, 1, DraftMode.chain(2), **shape)
    spec = GRAMMARS["choice"]
    assert rig.join(0, 1, compiled(spec).matcher())
    first = byte_tokens(b"a")
    for rounds, copied in ((1, False), (2, False), (1, True)):
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 3, copied=False)
        rig.write_commit(0, first)
        rig.automata.add_commit(rig.lane, rig.row_slot, fill=True)
        rig.stream.synchronize()
        rig.exchange.device_masks.fill(0)
        for _ in range(rounds):
            rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 3, copied=copied)
        masks, _ = rig.rows()
        expected = rounds > 1 or copied
        assert masks[0, 0].any() == expected, (rounds, copied)
        rig.join(0, 1, compiled(spec).matcher())


def check_chain(rig, specs, history, drafts, end, first=0):
    masks, stamps = rig.rows()
    for slot, spec in enumerate(specs):
        for j in range(first, end):
            tokens = [*history[slot], *drafts[slot].path(j)]
            check_row(masks, stamps, slot, j, spec, tokens, 10 + len(tokens))


ROW_BYTES = 4 * VOCABULARY.words


def table_nbytes(spec):
    return len(table_data(compiled(spec).automaton.table(), 0, 1))


def fill_states(rig, spec, texts, epoch, row_of=oracle):
    """Join one request per text, fill their rows and compare them with the oracle."""
    for slot in range(len(texts)):
        rig.automata.release(slot)
    for slot, text in enumerate(texts):
        assert rig.join(slot, epoch, compiled(spec).matcher(tokens=byte_tokens(text)), len(text))
    rig.begin()
    rig.automata.add_open(rig.lane, rig.row_slot, 1, copied=True)
    masks, stamps = rig.rows()
    for slot, text in enumerate(texts):
        check_row(masks, stamps, slot, 0, spec, byte_tokens(text), len(text), epoch, row_of)


def test_row_cache_is_bounded_and_rows_stay_correct(device, stream, shape):
    """With room for few rows and tables, rows of random states of many grammars are correct."""
    generator = random.Random(5)
    specs = [*GRAMMARS.values(), GrammarSpec.regex("[ab]{1,9}"), GrammarSpec.regex("(ab|c)*")]
    texts = {spec: visiting_texts(table_of(spec), 60) for spec in specs}
    table_bytes = max(table_nbytes(spec) for spec in specs)
    sizes = {"row_bytes": 7 * ROW_BYTES, "table_bytes": table_bytes}
    rig = AutomatonRig(device, stream, VOCABULARY, 4, DraftMode(drafts=0), **sizes, **shape)
    for epoch in range(1, 80):
        spec = generator.choice(specs)
        fill_states(rig, spec, generator.choices(texts[spec][:12], k=4), epoch)
        rig.check_cache()
    counts = rig.automata.counters()
    assert counts["hits"] > 40 and counts["evicted"] > 40
    assert counts["hits"] + counts["misses"] == 4 * 79
    assert counts["table_bytes"] <= table_bytes


def test_row_cache_row_is_read_by_later_kernels_only(device, stream, shape):
    """Two slots in one state: both rows are computed, one is stored, and then both are copied."""
    spec = GRAMMARS["choice"]
    rig = AutomatonRig(device, stream, VOCABULARY, 2, DraftMode(drafts=0), **shape)
    fill_states(rig, spec, [b"a", b"a"], 1)
    items = rig.items()
    assert items["source"].tolist() == [-1, -1]
    assert sorted(items["store"] >= 0) == [False, True]
    stored = items["store"].max()
    fill_states(rig, spec, [b"a", b"a"], 2)
    assert rig.items()["source"].tolist() == [stored, stored]
    fill_states(rig, spec, [b"al", b"a"], 3)
    assert rig.items()["source"].tolist() == [-1, stored]
    expected = {"hits": 3, "misses": 3, "stored": 2, "evicted": 0, "row_bytes": 2 * ROW_BYTES}
    counters = rig.automata.counters()
    assert {name: counters[name] for name in expected} == expected


def test_row_cache_has_no_stop_ids_of_requests(device, stream, shape):
    """The stored row of an accepting state serves requests with other stop ids."""
    other_stop = 0  # has no text
    spec = GrammarSpec.regex("a|ab")
    rig = AutomatonRig(device, stream, VOCABULARY, 1, DraftMode(drafts=0), **shape)
    found = []
    for epoch, stop in enumerate((STOP, other_stop, STOP), 1):
        matcher = compiled(spec).matcher((stop,), byte_tokens(b"a"))
        assert rig.join(0, epoch, matcher, 1)
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, 1, copied=True)
        found.append(bits(rig.rows()[0][0, 0]).tolist())
    assert found == [sorted([stop, FIRST_BYTE + ord("b")]) for stop in (STOP, other_stop, STOP)]
    assert rig.automata.counters()["hits"] == 2


def test_row_cache_keeps_rows_that_the_same_kernel_uses(device, stream, shape):
    """If the cache has one row, one request uses it, and the rows of the others are computed."""
    spec = GRAMMARS["choice"]
    rig = AutomatonRig(
        device, stream, VOCABULARY, 3, DraftMode(drafts=0), row_bytes=ROW_BYTES, **shape
    )
    for epoch in range(1, 6):
        fill_states(rig, spec, [b"a", b"al", b"b"], epoch)
        items = rig.items()
        assert np.count_nonzero(items["source"] >= 0) + np.count_nonzero(items["store"] >= 0) == 1
        rig.check_cache()


def test_automaton_table_stays_while_requests_use_it(device, stream, shape):
    """Tables in use are not evicted; a request whose table does not fit stays on the host."""
    first, second = GRAMMARS["regex"], GRAMMARS["choice"]
    table_bytes = max(table_nbytes(first), table_nbytes(second))
    rig = AutomatonRig(
        device, stream, VOCABULARY, 2, DraftMode(drafts=0), table_bytes=table_bytes, **shape
    )
    assert rig.join(0, 1, compiled(first).matcher())
    assert not rig.join(1, 1, compiled(second).matcher())
    rig.automata.release(0)
    assert rig.join(1, 2, compiled(second).matcher())
    assert not rig.join(0, 2, compiled(first).matcher())
    assert not rig.join(0, 2, compiled(GrammarSpec.json_schema({"type": "object"})).matcher())


def test_automaton_table_that_cannot_fit_evicts_no_other(device, stream, shape):
    small, large = sorted((GRAMMARS["regex"], GRAMMARS["choice"]), key=table_nbytes)
    table_bytes = table_nbytes(large) - 1
    rig = AutomatonRig(
        device, stream, VOCABULARY, 2, DraftMode(drafts=0), table_bytes=table_bytes, **shape
    )
    assert rig.join(0, 1, compiled(small).matcher())
    rig.automata.release(0)
    assert not rig.join(1, 1, compiled(large).matcher())
    counters = rig.automata.counters()
    assert (counters["tables"], counters["tables_evicted"]) == (1, 0)


@pytest.mark.parametrize("in_use", [0, 1])
def test_automaton_table_evicts_only_tables_in_its_range(
    device, stream, shape, caplog, in_use, monkeypatch
):
    """If a table does not fit because other tables have users, no table is evicted.

    The table is then not built again for each request.

    Three small tables fill the memory. The large table needs the memory of two adjacent tables, so
    it does not fit while the middle table has a user.
    """
    small = [GrammarSpec.choice([f"{letter}{letter}"]) for letter in "abc"]
    large = GrammarSpec.choice(["dd" * 16])
    nbytes = -(-max(map(table_nbytes, small)) // 256) * 256
    assert nbytes < table_nbytes(large) <= 2 * nbytes
    rig = AutomatonRig(
        device, stream, VOCABULARY, 4, DraftMode(drafts=0), table_bytes=3 * nbytes, **shape
    )
    for slot, spec in enumerate(small):
        assert rig.join(slot, 1, compiled(spec).matcher())
    for slot in range(3):
        if not (in_use and slot == 1):
            rig.automata.release(slot)
    built = []
    monkeypatch.setattr(device_module, "table_data", lambda *a: built.append(a) or table_data(*a))
    for epoch in range(1, 4):
        assert rig.join(3, epoch, compiled(large).matcher()) == (not in_use)
        rig.automata.release(3)
    assert len(built) == 1
    counters = rig.automata.counters()
    assert counters["tables"] == (3 if in_use else 2)
    assert counters["tables_evicted"] == (0 if in_use else 2)
    assert counters["tables_refused"] == (3 if in_use else 0)
    assert len(caplog.records) == in_use  # only the first refusal is a warning
    rig.automata.release(1)
    assert rig.join(3, 8, compiled(large).matcher())
    if not in_use:
        assert rig.join(
            2, 9, compiled(small[2]).matcher()
        )  # the least recently used tables were evicted
        assert rig.automata.counters()["tables_evicted"] == 2


def test_request_is_not_promoted_if_grammar_names_its_stop_id(device, stream):
    tokens = [bytes([byte]) for byte in range(256)] + [b"", b""]
    vocabulary = Vocabulary(tokens, 258, [256], {"[CALL]": 257})
    tag = {"type": "tag", "begin": "[CALL]", "content": {"type": "any_text"}, "end": "."}
    grammar = LLGuidanceBackend(vocabulary).compile(GrammarSpec.structural_format(tag))
    rig = AutomatonRig(device, stream, vocabulary, 2, DraftMode(drafts=0))
    assert rig.join(0, 1, grammar.matcher())
    assert not rig.join(1, 1, grammar.matcher(stop_ids=[256, 257]))


@pytest.mark.full
def test_device_automata_of_real_schemas_have_rows_of_host(device, stream, shared_data):
    """The oracle is the host's matcher: the slow matcher takes minutes for some of the schemas."""
    rig = AutomatonRig(device, stream, VOCABULARY, 16, DraftMode(drafts=0))
    compared = 0
    epoch = 0
    for schema in real_schemas(shared_data, 20):
        spec = GrammarSpec.json_schema(schema, strict=True)
        if not has_automaton(spec):
            continue
        texts = visiting_texts(table_of(spec), 96)
        for first in range(0, len(texts), 16):
            epoch += 1
            fill_states(rig, spec, texts[first : first + 16], epoch, host_row)
        compared += 1
    assert compared > 250
    assert rig.automata.counters()["hits"] > 0
