"""Automata with a stack, compared with `RuleMatcher` on random grammars in brackets."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rule_matcher import RuleMatcher
from test_schema_automata import real_schemas

from graft.grammar import GrammarError, GrammarSpec, resolve_spec
from graft.grammar.automaton.lower import compile_automaton
from graft.grammar.regular.expression import (
    EMPTY,
    both,
    call,
    characters,
    concat,
    members,
    minus,
    optional,
    repeat,
    text,
    union,
)
from graft.native import _native

STOP = 0
MAX_STATES = 2048
FAR = (2**31 - 1) // 4
#: Values in the column of entries of an automaton's actions.
COUNT, RESET = -2, -3
COMMA = text(",")
ALPHABET = 'ab,"é'
ANY_CHARACTER = characters([(0x20, 0x7E), (0xE8, 0xEA)])
LETTER = characters([(0x61, 0x7A)])


def make_tokens():
    """Return the bytes of tokens: none for the stop id, each byte, and texts across brackets."""
    generator = random.Random(1)
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    for _ in range(150):
        length = generator.randint(2, 6)
        tokens.append("".join(generator.choices(ALPHABET + "[]{}[]{}", k=length)).encode())
    return [*tokens, b"}}]}", b'"},{"', b"{}", b"[]]", b"x\xc3", b"\xa9,", b"[" * 4, b"]" * 4]


TOKENS = make_tokens()
WORDS = -(-len(TOKENS) // 32)


def make_trie(tokens):
    return _native.guide.TokenTrie([len(token) for token in tokens], b"".join(tokens), len(tokens))


TRIE = make_trie(TOKENS)


def rule(brackets, expression):
    return ord(brackets[0]), ord(brackets[1]), expression


def compile_rules(rules, max_states=MAX_STATES, **options):
    return _native.guide.compile_automaton(rules, max_states, **options)


def load(data, trie=TRIE, row_bytes=1 << 20):
    return _native.guide.AutomatonGrammar(data, trie, _native.guide.RowMemory(row_bytes))


def compile_grammar(*rules, **options):
    return load(compile_rules([(0, 0, rules[0]), *rules[1:]]), **options)


def matcher_of(grammar, tokens=()):
    matcher = _native.guide.AutomatonMatcher(grammar, (STOP,))
    for token in tokens:
        assert matcher.accept(token)
    return matcher


def legal_ids(matcher, *budget, words=WORDS):
    row = np.zeros(words, np.int32)
    assert matcher.fill(row, *budget)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accept_text(matcher, content):
    """Accept a text byte by byte; return whether it is legal."""
    return all(matcher.accept(1 + byte) for byte in content)


def accepts(grammar, content):
    matcher = matcher_of(grammar)
    return accept_text(matcher, content.encode()) and matcher.accept(STOP)


# Random grammars ----------------------------------------------------------------------------------


def random_expression(generator, depth, num_rules):
    """Return a random expression; it contains no calls if `num_rules` is 1."""
    kind = generator.random()

    def part(rules=num_rules):
        return random_expression(generator, depth - 1, rules)

    if depth == 0 or kind < 0.2:
        if num_rules > 1 and generator.random() < 0.5:
            return call(generator.randint(1, num_rules - 1))
        if generator.random() < 0.1:
            return generator.choice([EMPTY, characters([])])
        leaf = text("".join(generator.choices(ALPHABET, k=generator.randint(1, 3))))
        if generator.random() < 0.3:
            leaf = characters([(0x61, 0x62), (0xE8, 0xEA)])
        if generator.random() < 0.2:
            low = generator.randint(0, 2)
            leaf = repeat(leaf, low, low + generator.randint(1, 8))
        return leaf
    if kind < 0.5:
        return concat([part() for _ in range(generator.randint(1, 3))])
    if kind < 0.75:
        return union([part() for _ in range(generator.randint(2, 3))])
    low = generator.randint(0, 2)
    if kind < 0.82:
        return repeat(part(), low, generator.choice([None, low, low + 1]))
    if kind < 0.94:
        items = []
        for _ in range(generator.randint(0, 4)):
            low = generator.choice([0, 0, 1, 2])
            high = generator.choice([None, low, low + 1])
            items.append((concat([text(generator.choice("ab")), part()]), low, high))
        return members(COMMA, items)
    if generator.random() < 0.5:
        low = generator.randint(0, 2)
        return both(part(1), repeat(ANY_CHARACTER, low, low + generator.randint(1, 12)))
    return generator.choice([both, minus])(part(1), part(1))


def random_rules(seed):
    generator = random.Random(seed)
    num_rules = generator.randint(1, 4)
    rules = [(0, 0, random_expression(generator, 3, num_rules))]
    for _ in range(1, num_rules):
        depth = generator.randint(1, 2)
        brackets = generator.choice(["[]", "{}", "[}"])
        rules.append(rule(brackets, random_expression(generator, depth, num_rules)))
    return rules


def random_grammars(seeds, **options):
    """Yield random rules whose grammars have a text, and the serialized automata.

    `options` are those of ``compile_automaton``.
    """
    for seed in seeds:
        rules = random_rules(seed)
        try:
            yield rules, compile_rules(rules, **options)
        except ValueError as error:
            if "allows no text" in str(error):
                assert RuleMatcher(rules).legal(RuleMatcher(rules).start) == (set(), False)
            else:
                assert "bracket" in str(error)


def random_walk(generator, matcher, steps):
    """Accept up to `steps` random tokens, preferably long ones, and yield after each of them."""
    for _ in range(steps):
        legal = sorted(legal_ids(matcher) - {STOP}, key=lambda token: -len(TOKENS[token]))
        if not legal:
            return
        assert matcher.accept(generator.choice(generator.choice([legal, legal[:5]])))
        yield


#: Seeds, and the number of optional repetitions that automata write out instead of counting them.
SEEDS = [
    pytest.param(range(40), 200, id="40"),
    pytest.param(range(40), 0, id="counting"),
    pytest.param(range(40, 2000), 200, marks=pytest.mark.full, id="1960"),
    pytest.param(range(40, 2000), 0, marks=pytest.mark.full, id="1960-counting"),
]


@pytest.mark.parametrize("seeds, max_unrolled", SEEDS)
def test_automaton_allows_tokens_of_rule_matcher(seeds, max_unrolled):
    """Rows and accepted tokens are correct after random tokens and rollbacks."""
    generator = random.Random(2)
    for rules, data in random_grammars(seeds, max_unrolled=max_unrolled):
        expected = RuleMatcher(rules)
        # The rows of the second grammar are never stored, because their memory is limited to 0.
        matchers = [matcher_of(load(data)), matcher_of(load(data, row_bytes=0))]
        nodes = [expected.start]
        for _ in range(25):
            legal = {
                token
                for token in range(1, len(TOKENS))
                if expected.is_prefix(TOKENS[token], nodes[-1])
            }
            if expected.legal(nodes[-1])[1]:
                legal.add(STOP)
            assert [legal_ids(matcher) for matcher in matchers] == [legal, legal]
            illegal = sorted(set(range(len(TOKENS))) - legal)
            for matcher in matchers:
                assert not any(map(matcher.accept, generator.sample(illegal, 5)))
            texts = sorted(legal - {STOP}, key=lambda token: -len(TOKENS[token]))
            # The time of `RuleMatcher` can grow exponentially with the nesting.
            goes_back = not texts or len(matchers[0].stack) > 5 or generator.random() < 0.2
            if len(nodes) > 1 and goes_back:
                count = generator.randint(1, len(nodes) - 1)
                del nodes[-count:]
                for matcher in matchers:
                    matcher.rollback(count)
            elif texts:
                token = generator.choice(generator.choice([texts, texts[:5]]))
                assert all(matcher.accept(token) for matcher in matchers)
                nodes.append(expected.after(TOKENS[token], nodes[-1]))


@pytest.mark.parametrize("seeds, max_unrolled", SEEDS)
def test_row_with_budget_allows_tokens_that_can_be_completed(seeds, max_unrolled):
    """Check rows with a budget, and that following them completes the text within the budget."""
    generator = random.Random(3)
    known = 0
    for _, data in random_grammars(seeds, max_unrolled=max_unrolled):
        matcher = matcher_of(load(data))
        if matcher.distance() < 0:
            assert has_ambiguous_entry(matcher.grammar.table())
            continue
        known += 1
        check_budgets(generator, matcher)
        for _ in random_walk(generator, matcher, 8):
            check_budgets(generator, matcher)
    assert known > len(seeds) / 3


def has_ambiguous_entry(table):
    """Return whether an entry has several exits; only then, distances may be unknown."""
    return any(np.diff(table["returns_begin"]) > 1)


def check_budgets(generator, matcher):
    distance = matcher.distance()
    legal = legal_ids(matcher)
    assert (distance == 1) == (STOP in legal)
    after = {}
    for token in legal:
        assert matcher.accept(token)
        after[token] = matcher.distance()
        matcher.rollback(1)
    assert min(after.values()) <= distance - 1
    for budget in [*range(distance - 1, distance + 3), distance + generator.randint(3, 40)]:
        row = legal_ids(matcher, budget)
        assert row == {token for token in legal if after[token] <= budget - 1}
    budget = distance + generator.randint(0, 10)
    tokens = 0
    while not matcher.is_terminated():
        allowed = sorted(legal_ids(matcher, budget - tokens))
        assert allowed, "no token is left"
        assert matcher.accept(generator.choice(allowed))
        tokens += 1
    assert tokens <= budget
    matcher.rollback(tokens)
    assert matcher.distance() == distance


@pytest.mark.parametrize("seeds, max_unrolled", SEEDS)
def test_distances_of_table_decrease_by_a_token(seeds, max_unrolled):
    """From each state, with an unknown stack, one token leads at least one token closer to the end.

    The test reads the table as the device does, without the native matcher.
    """
    for _, data in random_grammars(seeds, max_unrolled=max_unrolled):
        table = load(data).table()
        for state, distance in enumerate(table["distance"].tolist()):
            if distance == FAR:
                assert has_ambiguous_entry(table)
            else:
                check_distance(table, state)
        begins = table["returns_begin"]
        for entry, cost in enumerate(table["cost"].tolist()):
            states = table["returns"][begins[entry] : begins[entry + 1], 1]
            assert cost == table["distance"][states].max()


def check_distance(table, state):
    best = 1 if table["accepting"][state] else FAR
    for token in TOKENS[1:]:
        best = min(best, 1 + distance_after(table, state, token))
    assert best <= table["distance"][state]


@pytest.mark.parametrize("count, steps", [(12, 6), pytest.param(300, 12, marks=pytest.mark.full)])
def test_real_schemas_are_completed_within_every_budget(shared_data, count, steps):
    """Check the rows with a budget, and the distances of a sample of states, of real schemas."""
    generator = random.Random(5)
    checked = 0
    for schema in real_schemas(shared_data, count):
        spec = GrammarSpec.json_schema(schema)
        try:
            data = compile_automaton(resolve_spec(spec, "llguidance"))
        except GrammarError:  # the router refuses the schema
            continue
        if data is None:
            continue
        checked += 1
        grammar = load(data)
        matcher = matcher_of(grammar)
        check_budgets(generator, matcher)
        for _ in random_walk(generator, matcher, steps):
            check_budgets(generator, matcher)
        table = grammar.table()
        for state in generator.sample(range(grammar.num_states), min(grammar.num_states, 20)):
            check_distance(table, state)
    assert checked > count / 2


def distance_after(table, state, token, stack=()):
    """Return the distance after a token, which may end with the end of the state's rule.

    The value of the counter is unknown, so the result is the largest distance of all values.
    """
    stack = [*stack]
    for index, byte in enumerate(token):
        state = table["next"][state, table["classes"][byte]]
        if state == -1:
            return FAR
        if state >= 0:
            continue
        entry, target = table["actions"][-2 - state].tolist()
        if entry == COUNT:
            rest = token[index + 1 :]
            states = table["counts"][target, 1:]
            return max(distance_after(table, following, rest, stack) for following in states)
        if entry >= 0 or entry == RESET:
            stack += [entry] * (entry >= 0)
            state = target
        elif stack:
            top = stack.pop()
            begin, end = table["returns_begin"][top : top + 2]
            states = dict(table["returns"][begin:end].tolist())
            if target not in states:
                return FAR
            state = states[target]
        else:
            return 0 if index == len(token) - 1 else FAR
    return table["distance"][state] + sum(table["cost"][entry] for entry in stack)


# Grammars with known texts ------------------------------------------------------------------------

VALUE = union([text("1"), call(1), call(2)])
JSON = (
    VALUE,
    rule("[]", members(COMMA, [(VALUE, 0, None)])),
    rule("{}", members(COMMA, [(concat([text('"a":'), VALUE]), 0, None)])),
)


def test_recursive_grammar_has_unlimited_depth():
    grammar = compile_grammar(*JSON)
    assert accepts(grammar, '[1,{"a":[],"a":[1]},[[[]]]]')
    for content in ("[1,]", "[1}", '{"a":1', "]", '{"a":1}]', "[,]", ""):
        assert not accepts(grammar, content)
    depth = 5000
    matcher = matcher_of(grammar)
    assert accept_text(matcher, b"[" * depth)
    assert len(matcher.stack) == depth
    assert matcher.distance() == depth + 1
    assert not matcher.accept(STOP)
    matcher.rollback(depth - 1)
    assert len(matcher.stack) == 1
    assert accept_text(matcher, b"]") and matcher.accept(STOP)


def test_token_closes_several_rules():
    grammar = compile_grammar(*JSON)
    matcher = matcher_of(grammar)
    assert accept_text(matcher, b'{"a":[{"a":{"a":1')
    token = TOKENS.index(b"}}]}")
    assert token in legal_ids(matcher)
    assert matcher.accept(token)
    assert matcher.stack == [] and matcher.accept(STOP)


def test_union_of_rules_with_equal_beginnings_is_decided_by_the_end():
    """The same brackets belong to two rules, which have different continuations."""
    inner = concat([text("a"), optional(text("b"))])
    grammar = compile_grammar(
        union([concat([call(1), text("x")]), concat([call(2), text("y")])]),
        rule("[]", inner),
        rule("[]", text("a")),
    )
    for content in ("[a]x", "[ab]x", "[a]y"):
        assert accepts(grammar, content)
    assert not accepts(grammar, "[ab]y")


def test_rules_without_finite_text_are_removed():
    grammar = compile_grammar(
        union([concat([text("a"), call(1)]), text("b")]), rule("[]", concat([text("c"), call(1)]))
    )
    assert legal_ids(matcher_of(grammar)) == {1 + ord("b")}
    with pytest.raises(ValueError, match="allows no text"):
        compile_grammar(call(1), rule("[]", call(1)))


def test_members_have_separators_between_neighbours():
    items = [(text("a"), 0, 1), (text("b"), 1, 2), (text("c"), 0, None), (text("d"), 0, 1)]
    grammar = compile_grammar(members(COMMA, items))
    for content in ("b", "a,b", "b,b", "b,c,c,c", "a,b,b,c,d", "b,d"):
        assert accepts(grammar, content)
    for content in ("", "a", "b,", ",b", "ab", "b,a", "b,b,b", "b,d,d", "b,,d"):
        assert not accepts(grammar, content)


def test_automaton_of_optional_members_is_linear_in_their_number():
    def num_states(count):
        items = [(text(f"key{i:03}:1"), 0, 1) for i in range(count)]
        return compile_grammar(members(COMMA, items)).num_states

    assert num_states(100) < 11 * num_states(10)


def test_intersection_and_difference():
    letters = repeat(characters([(0x61, 0x7A)]), 0, None)
    words = union([text("tea"), text("ten"), text("")])
    grammar = compile_grammar(concat([minus(letters, words), text("."), both(letters, words)]))
    for content in ("te.tea", "a.", "tens.ten"):
        assert accepts(grammar, content)
    for content in ("tea.tea", ".tea", "te.te"):
        assert not accepts(grammar, content)


def test_equal_intersections_are_independent():
    """An intersection that occurs again is copied, also if it counts or has no texts."""
    word = both(concat([repeat(LETTER, 1, None), text("!")]), repeat(ANY_CHARACTER, 0, 300))
    grammar = compile_grammar(concat([word, text(","), word, text(";")]))
    assert len(grammar.table()["counts"]) > 0
    for first, second in ((299, 299), (299, 1), (1, 299), (1, 1)):
        content = "a" * first + "!," + "b" * second + "!"
        assert accepts(grammar, content + ";")
        assert not accepts(grammar, content) and not accepts(grammar, content + "," + content)
    for content in ("a" * 300 + "!,b!;", "a!," + "b" * 300 + "!;"):
        assert not accepts(grammar, content)
    nothing = both(characters([]), text("a"))
    options = [concat([nothing, text("x")]), concat([nothing, text("y")]), text("ok")]
    grammar = compile_grammar(union(options))
    assert legal_ids(matcher_of(grammar)) == {1 + ord("o")}


def make_long_tokens():
    """Return tokens of up to 40 characters, with and without a quotation mark at the end."""
    texts = [
        *("é" * count for count in range(2, 9)),
        *("ab" * count for count in range(1, 21)),
        *("b" * count + '"' for count in range(1, 40, 3)),
        *("abc", "b日a", 'ab"', 'é"', "éa", "\n", "a\n", "\\"),
    ]
    return [*TOKENS, *(content.encode() for content in texts)]


LONG_TOKENS = make_long_tokens()
LONG_WORDS = -(-len(LONG_TOKENS) // 32)
LONG_TRIE = make_trie(LONG_TOKENS)
PLAIN = characters([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0x10FFFF)])
QUOTE = text('"')
STRINGS = {
    "free": repeat(PLAIN, 0, None),
    "short": repeat(PLAIN, 0, 5),
    "bounded": repeat(PLAIN, 2, 40),
    "long": repeat(PLAIN, 4, None),
    "key": minus(repeat(PLAIN, 0, None), union([text("ab"), text("é"), text("éab"), text("")])),
    "search": concat([repeat(PLAIN, 0, None), text("ab日x"), repeat(PLAIN, 0, None)]),
    "words": concat([text("x"), repeat(PLAIN, 0, None), union([text("ab"), text("bbb")])]),
    "prefix": concat([union([text("ab"), text("x")]), repeat(PLAIN, 0, 3)]),
}


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("closed", [False, True], ids=["root", "rule"])
def test_rows_within_strings_allow_accepted_tokens(name, closed):
    """States within strings start from rows that all grammars share."""
    value = concat([QUOTE, STRINGS[name], QUOTE])
    rules = [(0, 0, call(1)), rule("[]", value)] if closed else [(0, 0, value)]
    grammar = load(compile_rules(rules), LONG_TRIE)
    for start in ("", "a", "ab", "é", "xx", "abab", "éa", "x" * 5):
        matcher = matcher_of(grammar)
        if not accept_text(matcher, (b'["' if closed else b'"') + start.encode()):
            continue
        distance = matcher.distance()
        after = {}
        for token in range(1, len(LONG_TOKENS)):
            if matcher.accept(token):
                after[token] = matcher.distance()
                matcher.rollback(1)
        assert legal_ids(matcher, words=LONG_WORDS) == set(after)
        for budget in range(distance - 1, distance + 6):
            allowed = {token for token in after if after[token] <= budget - 1}
            assert legal_ids(matcher, budget, words=LONG_WORDS) == allowed


@pytest.mark.parametrize(
    "rules",
    [
        [union([text("[a"), call(1)]), rule("[]", text("b"))],
        [call(1), rule("[]", repeat(text("]"), 0, 2))],
        [call(1), rule("||", optional(call(1)))],
    ],
    ids=["opening", "closing", "same"],
)
def test_bracket_that_may_be_another_character_is_refused(rules):
    with pytest.raises(ValueError, match="may be a bracket or another character"):
        compile_grammar(*rules)


@pytest.mark.parametrize(
    "program",
    [[5, 0], [5, 2], [0, 6, 1, 0, 1], [0, 0, 6, 1, 2, 1], [0, 7], [5, 1, 0, 8], [0, 6, -1], [9]],
)
def test_malformed_rule_raises(program):
    with pytest.raises(RuntimeError, match="malformed expression"):
        compile_grammar(program, rule("[]", EMPTY))


def test_rules_must_exist_and_have_bytes():
    for rules in ([], [(0, 256, EMPTY)], [(-1, 0, EMPTY)]):
        with pytest.raises(RuntimeError, match="automaton"):
            compile_rules(rules)


@pytest.mark.parametrize("max_states", [9, 1000])
def test_number_of_states_is_limited(max_states):
    with pytest.raises(ValueError, match=f"more than {max_states} states"):
        compile_rules([(0, 0, repeat(text("ab"), 600, 600))], max_states)
    assert load(compile_rules([(0, 0, repeat(text("ab"), 600, 600))], 2000)).num_states == 1201


@pytest.mark.parametrize("count", [200, pytest.param(20000, marks=pytest.mark.full)])
def test_invalid_serialized_automaton_raises_or_is_harmless(count):
    """Changed data is refused, or the matcher still works within the arrays of the automaton."""
    generator = random.Random(4)
    original = compile_rules([(0, 0, JSON[0]), *JSON[1:]])
    refused = 0
    for _ in range(count):
        data = bytearray(original)
        for _ in range(generator.randint(1, 3)):
            position = generator.choice([generator.randrange(60), generator.randrange(len(data))])
            data[position] = generator.choice([0, 1, 2, 127, 128, 254, 255])
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        try:
            grammar = load(bytes(data))
        except RuntimeError as error:
            assert "invalid data" in str(error)
            refused += 1
            continue
        matcher = matcher_of(grammar)
        for _ in random_walk(generator, matcher, 5):
            legal_ids(matcher, generator.randint(1, 9))
    assert refused > count // 2


def test_threads_share_rows_of_a_grammar():
    grammar = compile_grammar(*JSON)

    def walk(seed):
        generator = random.Random(seed)
        matcher = matcher_of(grammar)
        return [sorted(legal_ids(matcher)) for _ in random_walk(generator, matcher, 40)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(walk, [1, 2] * 4))
    assert found[0::2] == [found[0]] * 4 and found[1::2] == [found[1]] * 4


def test_distance_is_unknown_without_tokens_of_all_bytes():
    """No token contains the closing byte, so no number of tokens completes the text."""
    tokens = [b"", b"[", b"a"]
    data = compile_rules([(0, 0, call(1)), rule("[]", text("a"))])
    matcher = matcher_of(load(data, make_trie(tokens)))
    assert matcher.distance() == -1
    assert legal_ids(matcher, 1, words=1) == {1}


def test_distance_is_found_if_the_shortest_text_has_no_tokens():
    """The shortest text is ``a``, but the vocabulary can only write ``[bb]``."""
    tokens = [b"", b"[b", b"b]"]
    data = compile_rules([(0, 0, union([text("a"), call(1)])), rule("[]", repeat(text("b"), 1, 9))])
    matcher = matcher_of(load(data, make_trie(tokens)))
    assert matcher.distance() == 3
    assert legal_ids(matcher, 2, words=1) == set() and legal_ids(matcher, 3, words=1) == {1}


def test_distance_is_unknown_if_a_part_of_the_grammar_has_none():
    """After ``y``, objects of two rules begin alike, and one of them leads back to the same state.

    The text ``x`` could be completed, but rows with a budget would never allow ``y``.
    """
    repeated = concat([repeat(call(1), 0, None), call(2)])
    root = union([text("x"), concat([text("y"), repeated])])
    rules = [(0, 0, root), rule("{}", text("a")), rule("{}", text("b"))]
    tokens = [b"", *(bytes([byte]) for byte in b"xy{}ab")]
    matcher = matcher_of(load(compile_rules(rules), make_trie(tokens)))
    assert matcher.distance() == -1
    assert matcher.accept(1) and matcher.distance() == -1
    assert legal_ids(matcher_of(matcher.grammar), 2, words=1) == {1, 2}


BEYOND_RULES = {
    # Only the token "]." completes "[a].".
    b"].": [(0, 0, union([text("x"), concat([call(1), text(".")])])), rule("[]", text("a"))],
    # Only the token "]}" completes "{[a]}", although "]" is a token too.
    b"]}": [(0, 0, union([text("x"), call(2)])), rule("[]", text("a")), rule("{}", call(1))],
}


@pytest.mark.parametrize("last", BEYOND_RULES)
def test_budget_is_ignored_if_only_a_token_beyond_a_rule_completes_a_text(last):
    """Rows with a budget far from its end have all tokens from which the text can be complete."""
    tokens = [b"", b"x", b"[", b"a", last, b"{", *([b"]"] if last == b"]}" else [])]
    matcher = matcher_of(load(compile_rules(BEYOND_RULES[last]), make_trie(tokens)))
    assert legal_ids(matcher, 100, words=1) == legal_ids(matcher, words=1)
    assert matcher.distance() == -1
    opening = [5, 2] if last == b"]}" else [2]
    matcher = matcher_of(matcher.grammar, [*opening, 3, 4, STOP])
    assert matcher.is_terminated()


def test_budget_is_ignored_if_the_search_for_distances_takes_too_long():
    """No token has only the byte "!", so the search looks at all tokens of 3,000 states."""
    generator = random.Random(1)
    words = {bytes(generator.choices(b"abcdefgh", k=5)) for _ in range(10_000)}
    tokens = [b"", b"x", b"a", b"b!", *sorted(words)]
    letters = repeat(characters([(ord("a"), ord("h"))]), 0, 3000)
    data = compile_rules([(0, 0, union([text("x"), concat([letters, text("!")])]))], 4000)
    matcher = matcher_of(load(data, make_trie(tokens)))
    words = -(-len(tokens) // 32)
    for _ in range(740):
        assert legal_ids(matcher, 10_000, words=words) == legal_ids(matcher, words=words)
        for _ in range(4):
            assert matcher.accept(2)
    assert matcher.accept(3) and matcher.accept(STOP)
    assert matcher.distance() in (-1, 0)
