"""Tests of EBNF grammars with LLGuidance, whose lexer is greedy.

The oracle is a recognizer without terminals and a lexer. For all rules at once, it computes the
positions at which each expression can end, until nothing changes.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from guide_util import BYTES, accepts

from graft.grammar import GrammarError, GrammarSpec, LLGuidanceBackend
from graft.grammar.backends.llguidance_ebnf import lark_grammar
from graft.grammar.regular import lexer
from graft.grammar.regular.ebnf import parse_ebnf

ALPHABET = "abc"
#: Expressions as (operation, *operands); rules by name.
Expression = tuple[Any, ...]


@pytest.fixture(scope="module")
def backend():
    return LLGuidanceBackend(BYTES)


def random_expression(rng: random.Random, names: list[str], depth: int) -> Expression:
    kind = rng.choice(["text", "text", "set", "rule", "rule", "sequence", "choice", "repeat"])
    if depth == 0 and kind in ("sequence", "choice", "repeat"):
        kind = "text"
    if kind == "text":
        return kind, "".join(rng.choices(ALPHABET, k=rng.choice([0, 1, 1, 1, 2, 2, 3])))
    if kind == "set":
        return kind, rng.sample(ALPHABET, rng.randint(1, 2)), rng.random() < 0.3
    if kind == "rule":
        return kind, rng.choice(names)
    if kind == "repeat":
        low, high = rng.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (2, None), (0, 0)])
        return kind, random_expression(rng, names, depth - 1), low, high
    parts = [random_expression(rng, names, depth - 1) for _ in range(rng.randint(2, 3))]
    return kind, parts


def notation(expression: Expression) -> str:
    kind, *operands = expression
    if kind == "text":
        return f'"{operands[0]}"'
    if kind == "set":
        characters, is_negated = operands
        return f"[{'^' if is_negated else ''}{''.join(characters)}]"
    if kind == "rule":
        return str(operands[0])
    if kind == "repeat":
        part, low, high = operands
        return f"({notation(part)}){{{low},{'' if high is None else high}}}"
    return f"({(' ' if kind == 'sequence' else ' | ').join(map(notation, operands[0]))})"


class Recognizer:
    """Decides whether a text belongs to a grammar."""

    def __init__(self, rules: dict[str, Expression], text: str):
        self.text = text
        self.ends: dict[tuple[str, int], set[int]] = {}
        self.rules = rules
        for name in rules:
            for start in range(len(text) + 1):
                self.ends[name, start] = set()
        changed = True
        while changed:
            changed = False
            for (name, start), known in self.ends.items():
                found = self.match(rules[name], start)
                changed = changed or not found <= known
                known |= found

    def match(self, expression: Expression, start: int) -> set[int]:
        kind, *operands = expression
        if kind == "text":
            is_here = self.text.startswith(operands[0], start)
            return {start + len(operands[0])} if is_here else set()
        if kind == "set":
            characters, is_negated = operands
            here = self.text[start : start + 1]
            return {start + 1} if here and (here in characters) != is_negated else set()
        if kind == "rule":
            return self.ends[operands[0], start]
        if kind == "choice":
            return set().union(*(self.match(option, start) for option in operands[0]))
        if kind == "sequence":
            ends = {start}
            for part in operands[0]:
                ends = set().union(*(self.match(part, end) for end in ends))
            return ends
        part, low, high = operands
        ends = {start}
        reached = {start} if low == 0 else set()
        for count in range(1, low + len(self.text) + 2 if high is None else high + 1):
            ends = set().union(*(self.match(part, end) for end in ends))
            if count >= low:
                reached |= ends
        return reached

    def accepts(self) -> bool:
        return len(self.text) in self.ends["root", 0]


TEXTS = ["".join(t) for length in range(6) for t in itertools.product(ALPHABET, repeat=length)]


def accepted_texts(compiled, texts: list[str]) -> set[str]:
    """Return all accepted texts that are at most as long as the longest of `texts`."""
    matcher = compiled.matcher()
    longest = max(map(len, texts))
    found = set()

    def walk(text: str) -> None:
        legal = set(matcher.legal().tolist())
        assert legal
        if 256 in legal:
            found.add(text)
        if len(text) == longest:
            return
        for character in ALPHABET:
            if ord(character) in legal:
                assert matcher.accept(ord(character))
                walk(text + character)
                matcher.rollback(1)

    walk("")
    return found


MORE_SEEDS = [
    pytest.param(range(first, first + 500), marks=pytest.mark.full) for first in (25, 525, 1025)
]


@pytest.mark.parametrize("seeds", [range(25), *MORE_SEEDS], ids=str)
def test_random_ebnf_grammars_have_exactly_their_texts(backend, seeds):
    """Most of the grammars are recursive. Some allow no text, and are refused."""
    recursive = 0
    for seed in seeds:
        rng = random.Random(seed)
        names = ["root", "x", "y", "z"][: rng.randint(1, 4)]
        rules = {name: random_expression(rng, names, 2) for name in names}
        for name in names:
            if rng.random() < 0.7:  # most recursions can end
                rules[name] = ("choice", [rules[name], ("text", rng.choice(ALPHABET))])
        text = "\n".join(f"{name} ::= {notation(part)}" for name, part in rules.items())
        expected = {t for t in TEXTS if Recognizer(rules, t).accepts()}
        try:
            compiled = backend.compile(GrammarSpec.ebnf(text))
        except GrammarError:
            assert not expected, text
            continue
        assert accepted_texts(compiled, TEXTS) == expected, text
        recursive += lark_grammar(text, "root").startswith("start: r")
    assert recursive > len(seeds) // 8


EXAMPLES = {
    'root ::= ("list" | "listen") "ed"': (["listed", "listened"], ["list", "listen"]),
    'root ::= [0-9]+ "0"': (["10", "100"], ["0", "1", "11"]),
    'root ::= "(" root ")" | [a-z]+ "z"': (["az", "(bzz)", "((zz))"], ["z", "(a)"]),
    'root ::= "" | root ("if" | "iffy" | "y")': (["iffy", "iffyy", "yif"], ["iff"]),
    'start-1 ::= x* # comment "\n\nx ::= [^a-y] | "é\\u20ac" | "\\U0001f600\\x41"': (
        ["", "zZ", "é€", "😀A", "€"],
        ["a", "é€b"],
    ),
    # The first bytes of é and è are equal, so the lexer may extend the terminal.
    'root ::= "é"+ x\nx ::= "è" | "a" x "b"': (["éè", "ééaèb"], ["èè", "éé"]),
    'root ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\n\\]-])* "\\"" root?': (
        ['"a"', '"a\\"""b\\n"', '"\\]\\-"'],
        ['"a', '"\\a"'],
    ),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_ebnf_grammar_is_exact(backend, text):
    compiled = backend.compile(GrammarSpec.ebnf(text, text.partition(" ")[0]))
    legal, illegal = EXAMPLES[text]
    assert [t for t in legal if not accepts(compiled, t)] == []
    assert [t for t in illegal if accepts(compiled, t)] == []


JSON = r"""
root ::= ws (object | array | string | number)
object ::= "{" ws (string ":" root ("," ws string ":" root)*)? "}" ws
array ::= "[" (root ("," root)*)? ws "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ws
ws ::= [ \n\t]*
"""


def test_recursive_ebnf_grammar_keeps_long_terminals(backend):
    """A string is one terminal, because the lexer can see where it ends."""
    strings = [line for line in lark_grammar(JSON, "root").splitlines() if r'"\""' in line]
    assert len(strings) == 1 and strings[0].startswith("T") and strings[0].count(r'"\""') == 2
    compiled = backend.compile(GrammarSpec.ebnf(JSON))
    assert accepts(compiled, '{ "a" : [-1.50, {"\\n]": []} , "x"] }\n')
    assert not accepts(compiled, '{"a": [1,]}')


def test_ebnf_terminals_with_many_states_are_split(backend, monkeypatch):
    """With small limits of states and positions, terminals are split. The texts are the same."""
    text = 'root ::= "x" | "(" root ")" | [ab]* "a" [ab]{6} "c"'
    whole = lark_grammar(text, "root")
    for limit in ("_MAX_STATES", "_MAX_STEPS", "_MAX_POSITIONS"):
        with monkeypatch.context() as patch:
            patch.setattr(lexer, limit, 5)
            split = lark_grammar(text, "root")
            assert split != whole
            compiled = backend.compile(GrammarSpec.ebnf(text))
            assert accepts(compiled, "(babbbbbbc)") and not accepts(compiled, "(bbbbbbbbc)")


@pytest.mark.parametrize(
    "rest", ['"b" x', 'x "b"', "x", '"b"? x', '"b" x{2,3} | "c" x', '[^a] y\ny ::= "b" x']
)
def test_ebnf_options_without_finite_text_are_never_begun(backend, rest):
    """Each of these rules x has only endless texts."""
    compiled = backend.compile(
        GrammarSpec.ebnf(f'root ::= "a" | "b" x | "ab" x{{0,2}}\nx ::= {rest}')
    )
    assert accepted_texts(compiled, ["bbbb"]) == {"a", "ab"}
    with pytest.raises(GrammarError, match='the root rule "root" has no text'):
        backend.compile(GrammarSpec.ebnf(f"root ::= x+\nx ::= {rest}"))


@pytest.mark.parametrize(
    "string",
    ["[a-z]{0,1000}", "(([a-z]{0,9}){0,9}){0,9}", "([a-z]? [0-9]?){500}", '(""){1000000000}'],
)
def test_ebnf_translation_counts_few_connections(backend, string):
    """On average, a position has at most four successors; the time grows with their number."""
    node = parse_ebnf(f"root ::= {string}", "root")["root"]
    positions = lexer._Positions.of(node)
    connections = sum(map(len, positions.following))
    assert connections <= 4 * len(positions.following)
    compiled = backend.compile(GrammarSpec.ebnf(f'root ::= "(" root ")" | "<" {string} ">"'))
    assert accepts(compiled, "(<>)") and not accepts(compiled, "(<A>)")


@pytest.mark.parametrize(
    "text, message",
    [
        ('root ::= "a" |', "line 1: expected an element, got 'the end'"),
        ('root ::= "a"\n)', r"line 2: expected a rule, got '\)'"),
        ('root ::= ("a"', r"line 1: expected \), got 'the end'"),
        ("root ::= [b-a]", "line 1: invalid range in"),
        ('root ::= "a" "\\q"', "unknown escape"),
        ('root ::= "\\x414"', "invalid escape"),
        ('root ::= "a"{3,2}', "invalid count"),
        ('root ::= "a"\nroot ::= "b"', "line 2: a second rule has the name 'root'"),
        ('"a"', "line 1: expected a rule"),
        ('root ::= "a" @', "line 1: unexpected '@'"),
        ("root ::= [^\\x00-\\U0010ffff]", "a character class contains no character"),
        ('root ::= TagDispatch(("a", root))', "line 1: unexpected ',' .*need the backend XGrammar"),
        ("root ::= x", 'rule "x" is not defined'),
        ('x ::= "a"', 'the root rule "root" is not found'),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_ebnf_errors_state_the_cause(backend, text, message):
    with pytest.raises(GrammarError, match=f"ebnf: .*{message}"):
        backend.compile(GrammarSpec("ebnf", text))
    with pytest.raises(GrammarError, match=f"ebnf: .*{message}"):
        GrammarSpec("ebnf", text).check("llguidance")


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (
            'root ::= "a" ws "b"\nws ::= | " " | "\\n" [ |]{0,2} # |',
            ["ab", "a b", "a\n||b"],
            ["a|b"],
        ),
        ('root ::= ("x" | ) y "|"\ny ::= "b" |', ["xb|", "b|", "x|", "|"], ["", "xb"]),
        ('root ::= (|"q")', ["", "q"], ["qq"]),
        ('root ::= "a"||"b"', ["", "a", "b"], ["ab"]),
        ('root ::= x? # ( |\nx ::= [|] | "c" .', ["", "|", "cd"], ["c"]),
    ],
)
def test_ebnf_alternatives_may_be_empty(backend, xgrammar, text, right, wrong):
    """The grammar of JSON that llama.cpp includes has such an alternative for white space."""
    spec = GrammarSpec.ebnf(text)
    spec.check("xgrammar")
    for one in (backend, xgrammar):
        compiled = one.compile(spec)
        assert [t for t in right if not accepts(compiled, t)] == []
        assert [t for t in wrong if accepts(compiled, t)] == []


def test_ebnf_texts_agree_with_xgrammar(backend, xgrammar):
    """Both libraries accept the same texts for grammars in this notation."""
    for text in EXAMPLES:
        spec = GrammarSpec.ebnf(text, text.partition(" ")[0])
        grammars = backend.compile(spec), xgrammar.compile(spec)
        for sample in [*EXAMPLES[text][0], *EXAMPLES[text][1]]:
            taken = [accepts(grammar, sample) for grammar in grammars]
            assert "Z" in sample or taken[0] == taken[1], (text, sample)
