"""Automata of Lark grammars have the mask rows of LLGuidance."""

from __future__ import annotations

import random

import pytest
from guide_util import accepts
from mask_walks import BACKEND, VOCABULARY, legal_ids, llguidance_matcher, require_equal_walks

from graft.grammar import GrammarError, GrammarSpec

#: Grammars with an automaton.
TABLES = {
    "literal": 'start: "abc"',
    "terminal": "start: /[0-9]+/ // digits\n",
    "rules": 'start: name ": " (INT | "true"i)\n# names\nname: WORD ("-" WORD)*\n'
    "WORD: LETTER+\nLETTER: /[a-z]/\nINT: /[1-9][0-9]*/",
    "counts": 'start: A~2 "-" A~1..3 "-" A{2,} "-" A{,2} "-" [B] B?\nA: "a".."c"\nB: "\\x62"',
    "options": 'start: "ab"\n     | "id" [" name"]\n     | /\\d{2}/ "."\n',
    "empty": 'start: "" | "name" ""',
    "separators": 'start: (row "\\n")+\nrow: CELL ("," CELL)*\nCELL: /[^,\\n]{1,5}/',
    "flags": "start: /ab/i /[^b]./s",
    "slash": r"start: /\/\w+/ (/,/ /[^\/,]+/)*",
    "list": 'start: list\nlist: item | item "," list\nitem: /[01]+/',
    "brackets": 'start: sum\nsum: part ("+" part)*\npart: INT | "(" sum ")"\nINT: /[0-9]+/',
    "objects": 'start: value\nvalue: "[" [value ("," value)*] "]" | NUMBER | STRING\n'
    'NUMBER: /[0-9]+/\nSTRING: "\\"" /[^"\\\\\\n]*/ "\\""',
    "same text": 'start: A "0" | B "1"\nA: "ab"\nB: /ab/',
    "prefixes": 'start: "name" " " | "named" "!"',
    "shared prefix": 'start: /é+/ "ab" | "è"',
    "unused": 'start: "a"\nother: "b" other "c" | "d"',
}
#: Grammars without an automaton.
WITHOUT = {
    "greedy": 'start: /a+/ "ab"',
    "prefix": 'start: "a" "bc" | "ab" "d"',
    "empty terminal": 'start: /a*/ "b"',
    "first byte": 'start: /é+/ "è"',
    "recursion": 'start: "a" start "b" | "c"',
    "left recursion": 'start: start "a" | "c"',
    "anchor": "start: /^a$/",
    "lazy": 'start: x "b"\nx[lazy]: /a+/',
    "ignored": 'start: "a" "b"\n%ignore " "',
    "imported": "start: INT\n%import common.INT",
    "json": 'start: %json {"type": "null"}',
    "intersection": "start: A\nA: /a+/ & /(aa)+/",
    "negation": "start: A\nA: ~/a/",
    "nested": 'start: %lark { start: "a" }',
    "priority": 'start: A\nA.2: "a"',
    "alias": 'start: "a" -> x',
    "named flag": "start: /a/m",
}


@pytest.mark.parametrize("name", TABLES)
def test_lark_automaton_has_masks_of_llguidance(name):
    assert require_equal_walks(GrammarSpec.lark(TABLES[name]), 6, 20) > 6


@pytest.mark.parametrize("name", WITHOUT)
def test_lark_grammar_without_exact_automaton_has_none(name):
    try:
        compiled = BACKEND.compile(GrammarSpec.lark(WITHOUT[name]))
    except GrammarError:
        pytest.skip("LLGuidance refuses the grammar")
    assert compiled.automaton is None
    assert legal_ids(compiled.matcher())


def random_grammar(rng: random.Random) -> str:
    """Return a grammar of terminals over few characters, some of which have equal first bytes."""
    characters = "ab(é" if rng.random() < 0.7 else "aéè)"

    def terminal(depth: int) -> str:
        kind = rng.choice(["text", "set", "many", "pattern", "range", "choice", "name"])
        if kind == "many" and depth:
            return f"({terminal(depth - 1)}){rng.choice(['+', '?', '*', '{1,3}', '~2'])}"
        if kind == "choice" and depth:
            return f"({terminal(depth - 1)} | {terminal(depth - 1)} {terminal(depth - 1)})"
        if kind == "set":
            return f"/[{''.join(rng.sample('abé', 2))}]/"
        if kind == "pattern":
            return f"/{rng.choice('abé')}{rng.choice(['+', '', '{2}', '.?'])}b?/"
        if kind == "range":
            return '"a".."b"'
        return '"' + "".join(rng.choices(characters, k=rng.choice([1, 1, 2, 2, 3]))) + '"'

    def rule(depth: int) -> str:
        kind = rng.choice(
            ["terminal", "terminal", "many", "sequence", "sequence", "choice", "rule"]
        )
        if depth and kind == "many":
            return f"({rule(depth - 1)}){rng.choice(['+', '?', '*', '{2}'])}"
        if depth and kind == "sequence":
            return f"{rule(depth - 1)} {rule(depth - 1)}"
        if depth and kind == "choice":
            return f"({rule(depth - 1)} | {rule(depth - 1)})"
        if kind == "rule":
            return rng.choice(["x", "y"])
        return rng.choice(["A", "B", terminal(0)])

    inner = rng.choice([rule(2), f'"(" start ")" | {terminal(0)}', f'{terminal(0)} [x "," y]'])
    lines = [f"start: {rule(3)}", f"x: {rule(2).replace('x', 'A').replace('y', 'B')}"]
    lines += [f"y: {inner.replace('y', 'B')}", f"A: {terminal(2)}", f"B: {terminal(1)}"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1500), marks=pytest.mark.full)], ids=len
)
def test_random_lark_automata_have_masks_of_llguidance(seeds):
    tables = 0
    for seed in seeds:
        spec = GrammarSpec.lark(random_grammar(random.Random(seed)))
        try:
            compiled = BACKEND.compile(spec)
        except GrammarError:
            continue
        if compiled.automaton is not None:
            tables += 1
            require_equal_walks(spec, 3, 10)
    assert tables > len(seeds) / 8


def test_closing_rows_of_lark_grammar_lead_to_complete_texts():
    compiled = BACKEND.compile(GrammarSpec.lark(TABLES["brackets"]))
    matcher = compiled.matcher()
    assert matcher.distance() == 2 and llguidance_matcher(compiled).distance() is None
    for _ in range(5):
        assert matcher.accept(VOCABULARY.tokens.index(b"("))
    assert matcher.distance() == 7


def test_lark_grammar_of_many_characters_compiles_within_the_time_limit(serve):
    """The limit refers to processor time. LLGuidance alone would need a hundredth of it."""
    characters = [chr(code) for code in range(0x4E00, 0x6600, 2)]
    options = " | ".join(f'"{character}"' for character in characters)
    service = serve("llguidance", timeout_s=3)
    compiled = service.submit(GrammarSpec.lark(f"start: ({options})+")).result()
    assert accepts(compiled, characters[0], characters[-1])
    assert not accepts(compiled, chr(0x4E01))
