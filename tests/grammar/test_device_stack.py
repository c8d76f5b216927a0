"""Automata with a stack on the device have the rows, stamps and counters of the host."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from automaton_rig import AutomatonRig
from reference_round import DEAD_END, ERROR, NOT_READY, READY, chain
from test_automaton_stack import (
    STOP,
    TOKENS,
    compile_grammar,
    compile_rules,
    legal_ids,
    load,
    matcher_of,
    random_grammars,
    rule,
)

from graft.cudagraph.driver.cstruct import read_numbers
from graft.grammar import GrammarSpec, Vocabulary
from graft.grammar.automaton.device import KERNELS
from graft.grammar.matcher import CompiledGrammar, NativeBackedMatcher
from graft.grammar.regular.expression import call, characters, concat, members, repeat, text, union
from graft.sampling.mode import DraftMode

VOCABULARY = Vocabulary(TOKENS, len(TOKENS), [STOP])
DRAFTS = 4
POSITION = 10
DEPTH = read_numbers(KERNELS / "automaton.cuh")["AUTOMATON_DEPTH"]
NO_BUDGET = 2**31 - 1
OPEN, CLOSE = 1 + ord("["), 1 + ord("]")
#: Lists of lists, with a letter after each list.
LISTS = compile_grammar(
    call(1), rule("[]", members(text(","), [(concat([call(1), text("a")]), 0, None)]))
)
#: Two kinds of objects that begin alike, and lists that contain them.
OBJECTS = compile_grammar(
    union([call(1), call(2), call(3)]),
    rule("{}", concat([text('"a"'), repeat(text(",a"), 0, 3)])),
    rule("{}", concat([text('"a"'), repeat(characters([(0x62, 0x62)]), 1, None), call(3)])),
    rule("[]", members(text(","), [(union([call(1), call(2)]), 0, 2)])),
)


@pytest.fixture(params=[(1, 1), (64, 3)], ids=["block1", "block64"])
def shape(request):
    """Threads per block and blocks per row: as on the soft device, or several."""
    block, parts = request.param
    return {"block": block, "parts": parts}


def wrapped(native):
    """Return a matcher of a native grammar, as `DeviceAutomata.join` takes it."""
    backend = SimpleNamespace(vocabulary=VOCABULARY)
    compiled = CompiledGrammar(backend, GrammarSpec.regex("a"), None, 0)
    return NativeBackedMatcher(compiled, (STOP,), native)


def join(rig, slot, grammar, tokens, closing_end=-1, epoch=1, position=POSITION):
    return rig.join(slot, epoch, wrapped(matcher_of(grammar, tokens)), position, closing_end)


def random_tokens(generator, matcher, count):
    """Accept up to `count` random tokens, preferably long ones, and return them."""
    tokens = []
    for _ in range(count):
        legal = sorted(legal_ids(matcher) - {STOP}, key=lambda token: -len(TOKENS[token]))
        if not legal:
            break
        tokens.append(generator.choice(generator.choice([legal, legal[:5]])))
        assert matcher.accept(tokens[-1])
    return tokens


def random_drafts(generator, grammar, tokens):
    """Return drafts that continue the tokens; most of them are legal."""
    drafts = []
    matcher = matcher_of(grammar, tokens)
    for _ in range(DRAFTS):
        legal = sorted(legal_ids(matcher) - {STOP})
        draft = generator.randrange(1, len(TOKENS))
        if legal and generator.random() < 0.9:
            draft = generator.choice(legal)
        drafts.append(draft)
        if not matcher.accept(draft):
            return drafts
    return drafts


def check_rows(rig, slot, grammar, tokens, drafts, closing_end=-1, epoch=1):
    """Compare a slot's rows and stamps with those of the host, which narrows rows by `fill`."""
    masks, stamps = rig.rows()
    matcher = matcher_of(grammar, tokens)
    for j in range(len(drafts) + 1):
        budget = NO_BUDGET if closing_end < 0 else closing_end - (POSITION + j) - 1
        is_legal = j == 0 or (drafts[j - 1] != STOP and matcher.accept(drafts[j - 1]))
        if not is_legal or matcher.distance() > budget or len(matcher.stack) > DEPTH:
            assert stamps[slot, j]["state"] == NOT_READY or stamps[slot, j]["epoch"] != epoch
            return
        row = np.zeros(VOCABULARY.words, np.int32)
        assert matcher.fill(row, budget)
        np.testing.assert_array_equal(masks[j, slot], row, f"row {j} of {tokens} {drafts}")
        state = READY if row.any() else DEAD_END
        assert stamps[slot, j].tolist() == (state, epoch, POSITION + j, 0)


@pytest.mark.parametrize("has_budget", [False, True], ids=["unlimited", "budget"])
@pytest.mark.full("block1-unlimited", "block64-budget")
def test_device_automaton_with_stack_has_rows_of_the_host(device, stream, shape, has_budget):
    generator = random.Random(int(has_budget))
    grammars = [LISTS, OBJECTS, *(load(data) for _, data in random_grammars(range(40)))]
    grammars = [grammar for grammar in grammars if matcher_of(grammar).distance() >= 0]
    slots = 8
    rig = AutomatonRig(device, stream, VOCABULARY, slots, DraftMode.chain(DRAFTS), **shape)

    for epoch, first in enumerate(range(0, 4 * len(grammars), slots), 1):
        requests = {}
        for slot in range(slots):
            grammar = grammars[(first + slot) % len(grammars)]
            matcher = matcher_of(grammar)
            tokens = random_tokens(generator, matcher, generator.randrange(12))
            if matcher.distance() < 0:
                continue
            closing_end = -1
            if has_budget:
                closing_end = POSITION + 1 + matcher.distance() + generator.randrange(8)
            promoted = join(rig, slot, grammar, tokens, closing_end, epoch)
            assert promoted == (len(matcher.stack) <= DEPTH)
            if not promoted:
                continue
            drafts = random_drafts(generator, grammar, tokens)
            tree = chain(0)
            for j, draft in enumerate(drafts):
                tree = tree.grow(j, draft)
            rig.write_drafts(slot, tree)
            requests[slot] = grammar, tokens, drafts, closing_end
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, DRAFTS + 1, copied=True)
        for slot, (grammar, tokens, drafts, closing_end) in requests.items():
            check_rows(rig, slot, grammar, tokens, drafts, closing_end, epoch)
            rig.automata.release(slot)
    narrowed = rig.automata.counters()["narrowed_rows"]
    assert narrowed > 50 if has_budget else narrowed == 0


def test_device_automaton_follows_commits_up_to_its_depth(device, stream, shape):
    """Commits push and pop; a stack that is too deep for the device is an error of its slot."""
    rig = AutomatonRig(device, stream, VOCABULARY, 2, DraftMode.chain(DRAFTS), **shape)
    for slot in range(2):
        assert join(rig, slot, LISTS, [])
    depths = [DEPTH, DEPTH + 1]
    for step in range(0, DEPTH + 1, 5):
        rig.begin()
        for slot, depth in enumerate(depths):
            rig.write_commit(slot, [OPEN] * min(5, depth - step))
        rig.automata.add_commit(rig.lane, rig.row_slot, fill=True)
    masks, stamps = rig.rows()
    assert stamps[:, 0]["state"].tolist() == [READY, ERROR]
    host = matcher_of(LISTS, [OPEN] * DEPTH)
    expected = np.zeros(VOCABULARY.words, np.int32)
    assert host.fill(expected)
    np.testing.assert_array_equal(masks[0, 0], expected)
    for _ in range(3):
        rig.begin()
        rig.write_commit(0, [CLOSE, 1 + ord("a")])
        rig.automata.add_commit(rig.lane, rig.row_slot, fill=True)
        assert host.accept(CLOSE)
        assert host.accept(1 + ord("a"))
    assert host.fill(expected)
    np.testing.assert_array_equal(rig.rows()[0][0, 0], expected)


@pytest.mark.parametrize("has_budget", [False, True], ids=["unlimited", "budget"])
def test_device_automaton_counts_characters(device, stream, shape, has_budget):
    """Rows of drafts before, at and after the limit of a string are those of the host."""
    limit = 30
    character = union([characters([(0x61, 0x62), (0xE9, 0xE9)]), text('\\"')])
    string = concat([text('"'), repeat(character, 0, limit), text('"')])
    rules = [(0, 0, call(1)), rule("[]", members(text(","), [(string, 0, None)]))]
    grammar = load(compile_rules(rules, max_unrolled=9))
    generator = random.Random(int(has_budget))
    rig = AutomatonRig(device, stream, VOCABULARY, 1, DraftMode.chain(DRAFTS), **shape)
    shared = []
    for epoch, length in enumerate([*range(12, limit + 1), limit, limit], 1):
        before = [1 + byte for byte in b'["ab","' + length * b"a"]
        matcher = matcher_of(grammar, before)
        committed = random_tokens(generator, matcher, 3)
        tokens = before + committed
        drafts = random_drafts(generator, grammar, tokens)
        closing_end = -1
        if has_budget:
            closing_end = POSITION + 1 + matcher.distance() + generator.randrange(8)
        rig.automata.release(0)
        assert join(rig, 0, grammar, before, closing_end, epoch, POSITION - len(committed))
        rig.begin()
        rig.write_commit(0, committed)
        rig.automata.add_commit(rig.lane, rig.row_slot, fill=True)
        tree = chain(0)
        for j, draft in enumerate(drafts):
            tree = tree.grow(j, draft)
        rig.write_drafts(0, tree)
        rig.begin()
        rig.automata.add_open(rig.lane, rig.row_slot, DRAFTS + 1, copied=True)
        shared += rig.items()["shared"].tolist()
        check_rows(rig, 0, grammar, tokens, drafts, closing_end, epoch)
    assert has_budget or 0 < sum(shared) < len(shared)
