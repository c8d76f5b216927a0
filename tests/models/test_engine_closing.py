"""Outputs that always close: with a grammar, the output is complete within `max_tokens`.

The grammar backend is `LanguageBackend`, whose matchers know the exact distance of every state.
"""

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import DRAFTER_OPTIONS, MORE_TREE_OPTIONS, answer, settled
from engine_util import demo_engine
from engine_util import outputs as final_outputs
from reference_language import LanguageBackend
from table_model import chi_square_p

from graft.grammar import GrammarSpec, Vocabulary, check_output
from graft.models.request import Request

PATTERNS = (
    r'\{"ids": \[[1-9][0-9]*(, [1-9][0-9]*)*\], "name": "[a-z ]*"\}',
    r"(ab|c[de]{2,4})+(;|, (x|yz)*!)",
    r"[a-z ,.]*",
)
PROMPT = [300, 301, 302]
MODES = (
    {},
    {"temperature": 1.5, "verify": "coupled"},
    {"temperature": 1.0, "verify": "rejection"},
    {"temperature": 1.2, "verify": "per_token", "top_p": 0.9},
    {"temperature": 1.0, "verify": "relaxed"},
)
ALL_OPTIONS = {**DRAFTER_OPTIONS, **MORE_TREE_OPTIONS}


def closing_engine(**options):
    return demo_engine(**{"max_batch_size": 8, "grammar_backend": LanguageBackend, **options})


@functools.cache
def smallest_budgets():
    """Return the number of tokens that the shortest output of each pattern needs."""
    with closing_engine(speculation=False, max_batch_size=1) as engine:
        outputs = engine.generate([pattern_request(pattern, 1) for pattern in PATTERNS])
    found = [re.search(r"needs (\d+) tokens", output.error or "") for output in outputs]
    return [int(match[1]) if match else 1 for match in found]


def pattern_request(pattern, max_tokens, **options):
    spec = GrammarSpec.regex(pattern)
    return Request(tokens=PROMPT, grammar=spec, max_tokens=max_tokens, **options)


def budget_requests(modes=MODES, count=5):
    """Return requests of all patterns, with the `count` smallest budgets."""
    requests = []
    modes = itertools.cycle(modes)
    for pattern, first in zip(PATTERNS, smallest_budgets(), strict=True):
        for budget in range(first, first + count):
            options = {"seed": len(requests), "closing": "require", **next(modes)}
            requests.append(pattern_request(pattern, budget, **options))
    return requests


def check_complete(request, output):
    assert (output.reason, output.closing) == ("stop", "guaranteed"), output
    assert len(output.tokens) <= request.max_tokens
    assert output.finished
    text = output.text.rpartition("</think>")[2]
    assert re.fullmatch(request.grammar.text, text), output.text


@pytest.fixture(scope="module")
def engine():
    with settled(closing_engine()) as shared:
        yield shared


@functools.cache
def expected_answers(count):
    """Answers to the greedy and coupled `budget_requests`, without speculation, one by one."""
    requests = budget_requests(count=count)
    with settled(closing_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        check_complete(request, output)
    return [
        answer(output) if request.verify in (None, "coupled") else None
        for request, output in zip(requests, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    "drafter, count",
    [
        ("dflash, lattice probe", 3),
        *(pytest.param(name, 12, marks=pytest.mark.full) for name in ALL_OPTIONS),
    ],
)
def test_closing_completes_outputs_with_every_drafter(drafter, count):
    """Every output is complete, and greedy and coupled ones are the same as without drafts."""
    requests = budget_requests(count=count)
    expected = expected_answers(count)
    with settled(closing_engine(**ALL_OPTIONS[drafter])) as engine:
        outputs = engine.generate(requests)
    for request, output, wanted in zip(requests, outputs, expected, strict=True):
        check_complete(request, output)
        assert wanted is None or answer(output) == wanted
    assert any(
        len(output.tokens) == r.max_tokens for r, output in zip(requests, outputs, strict=True)
    )


#: Schemas whose automata have a stack: recursion, any value, additional properties and bounds.
SCHEMAS = [
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["name", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    {"type": "array", "items": {}, "minItems": 1},
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["circle", "square"]},
            "label": {"type": "string", "minLength": 3, "maxLength": 40},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            "size": {"type": "number", "minimum": 0, "maximum": 2000},
        },
        "required": ["kind", "label"],
        "additionalProperties": False,
    },
]
STEP_OPTIONS = {
    "probe": {"draft_masking": "probe"},
    "probe, tree": {"draft_masking": "probe", **DRAFTER_OPTIONS["eagle3, tree"]},
    "unmasked": {"draft_masking": "none"},
    "unmasked, dflash tree": {"draft_masking": "none", **DRAFTER_OPTIONS["dflash, tree"]},
    "automatic length": {"draft_length": "auto"},
    "loop": {"generation": "graph"},
    "loop, tree": {"generation": "graph", **DRAFTER_OPTIONS["eagle3, tree"]},
    "loop, no drafter": {"generation": "graph", "speculation": False},
    "device": {"device_automata": True},
    "late": {"grammar_threads": 2, "grammar_budget_us": 1.0},
    "mailbox": {"grammar_transport": "mailbox", "forced_drafts": True},
}


def schema_requests(engine):
    """Return requests of all schemas, with every budget from the smallest one upwards."""
    requests = []
    modes = itertools.cycle(MODES)
    for schema in SCHEMAS:
        request = Request(
            prompt="x", grammar=GrammarSpec.json_schema(schema), max_tokens=1, closing="require"
        )
        [refused] = engine.generate([request])
        first = int(re.search(r"needs (\d+) tokens", refused.error)[1])
        for budget in (*range(first, first + 5), first + 40):
            seed = len(requests)
            requests.append(replace(request, max_tokens=budget, seed=seed, **next(modes)))
    return requests


@pytest.fixture(scope="module")
def expected_json():
    """Answers to the greedy and coupled `schema_requests`, without speculation, one by one."""
    with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
        requests = schema_requests(engine)
        outputs = engine.generate(requests)
    return [
        answer(output) if request.verify in (None, "coupled") else None
        for request, output in zip(requests, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("eagle3, tree", "loop") else pytest.mark.full)
        for n in {**ALL_OPTIONS, **STEP_OPTIONS}
    ],
)
@pytest.mark.full("loop")
def test_closing_completes_json_with_every_drafter(name, expected_json):
    """Every output is valid JSON of its schema, and uses at most its budget."""
    options = {**ALL_OPTIONS, **STEP_OPTIONS}[name]
    with settled(demo_engine(max_batch_size=8, **options)) as engine:
        requests = schema_requests(engine)
        outputs = engine.generate(requests)
        counters = engine.counters()["closing"]
        assert 9 < counters["requests"] <= len(requests)
        assert counters["requests"] <= counters["rows"]
        [fits] = engine.generate([replace(requests[0], max_tokens=400, temperature=0.0)])
        assert fits.closing == "guaranteed"
    for request, output, wanted in zip(requests, outputs, expected_json, strict=True):
        assert (output.reason, output.closing) == ("stop", "guaranteed"), output
        assert len(output.tokens) <= request.max_tokens
        assert check_output(request.grammar.schema, output.text), output.text
        assert wanted is None or answer(output) == wanted


def test_closing_off_allows_incomplete_outputs(engine):
    request = pattern_request(PATTERNS[0], 8, closing="off")
    [output] = engine.generate([request])
    assert (output.reason, output.closing, len(output.tokens)) == ("length", "off", 8)
    [free] = engine.generate([Request(tokens=PROMPT, max_tokens=2)])
    assert free.closing == "off"


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(MODES[0], id="greedy", marks=pytest.mark.full),
        pytest.param(MODES[1], id="coupled"),
    ],
)
def test_closing_leaves_outputs_unchanged_that_fit(engine, mode):
    """Outputs that are complete without closing are the same with it."""
    requests = []
    for pattern, budget in itertools.product((*PATTERNS, "[ab]{3,15}"), (20, 30)):
        requests.append(pattern_request(pattern, budget, seed=0, logprobs=3, **mode))
    closed = engine.generate(requests)
    free = engine.generate([replace(request, closing="off") for request in requests])
    reasons = set()
    for output, wanted in zip(closed, free, strict=True):
        assert output.reason == "stop"
        reasons.add(wanted.reason)
        if wanted.reason == "stop":
            assert answer(output) == answer(wanted)
    assert reasons == {"stop", "length"}


def test_closing_refuses_max_tokens_below_shortest_output(engine):
    needed = smallest_budgets()[0]
    for closing in ("auto", "require"):
        [output] = engine.generate([pattern_request(PATTERNS[0], needed - 1, closing=closing)])
        assert (output.reason, output.error_param) == ("refused", "max_tokens")
        assert f"max_tokens is {needed - 1}" in output.error
        assert f"needs {needed} tokens" in output.error
        assert not output.tokens
    request = pattern_request(PATTERNS[0], needed)
    [output] = engine.generate([request])
    check_complete(request, output)
    assert len(output.tokens) == needed


def test_closing_counts_positions_of_the_context():
    """Without `max_tokens`, the end of the context is the budget."""
    with settled(closing_engine(max_length=40, max_batch_size=2)) as engine:
        request = pattern_request(PATTERNS[2], None, closing="require", banned_ids=())
        [output] = engine.generate([replace(request, temperature=1.0, seed=3)])
        assert output.reason == "stop" and re.fullmatch(PATTERNS[2], output.text)
        assert len(output.tokens) <= 40 - len(PROMPT)


@pytest.mark.parametrize(
    "options",
    [{"closing": "require", "grammar": None}, {"closing": "always"}, {"max_reasoning_tokens": 5}],
    ids=str,
)
def test_request_rejects_invalid_closing(engine, options):
    [output] = engine.generate([Request(tokens=PROMPT, **options)])
    assert output.reason == "refused"
    assert output.error_param == next(iter(options))


def exact_law(engine, pattern, budget):
    """Return the probability of each output of a pattern under the rows of `budget`.

    The probabilities of the next tokens come from requests without a grammar that allow only the
    ids of a row.
    """
    tokenizer = engine.tokenizer
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer.backend, tokenizer.vocab_size, tokenizer.stop_ids
    )
    grammar = LanguageBackend(vocabulary).compile(GrammarSpec.regex(pattern))
    law = {}
    pending = {(): 1.0}
    while pending:
        rows = {}
        for prefix in pending:
            matcher = grammar.matcher(tokens=prefix)
            if matcher.is_terminated():
                law[prefix] = pending[prefix]
            else:
                rows[prefix] = matcher.allowed(budget - len(prefix))
        requests = [
            Request(
                tokens=[*PROMPT, *prefix],
                allowed_ids=row,
                max_tokens=1,
                logprobs=len(row),
                logprobs_masked=True,
            )
            for prefix, row in rows.items()
        ]
        outputs = engine.generate(requests)
        pending = {
            (*prefix, token): pending[prefix] * np.exp(value)
            for prefix, output in zip(rows, outputs, strict=True)
            for token, value in output.logprobs[0].top
        }
    return law


@pytest.mark.parametrize(
    "mode, drafter",
    [
        ("rejection", "eagle3"),
        pytest.param("per_token", "eagle3", marks=pytest.mark.full),
        pytest.param("coupled", "eagle3, tree", marks=pytest.mark.full),
        pytest.param("rejection", "dflash, lattice probe", marks=pytest.mark.full),
    ],
)
def test_sampled_outputs_follow_law_of_closing_rows(mode, drafter):
    """All outputs of a language whose budget binds pass a chi-square test against their law."""
    pattern = "(ab|[ac ])*(b|an)"
    budget = 4
    with settled(closing_engine(max_batch_size=32, **ALL_OPTIONS[drafter])) as engine:
        law = exact_law(engine, pattern, budget)
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-4)
        assert max(map(len, law)) == budget and len(law) > 20
        options = {"temperature": 1.0, "verify": mode}
        p_values = []
        while len(p_values) < 2 and (not p_values or p_values[-1] < 1e-3):  # retry once
            first = 10_000 * len(p_values)
            requests = [
                pattern_request(pattern, budget, seed=seed, **options)
                for seed in range(first, first + 200)
            ]
            counts = Counter(tuple(output.tokens) for output in engine.generate(requests))
            assert set(counts) <= set(law)
            observed = np.array([counts[tokens] for tokens in law])
            p_values.append(chi_square_p(observed, np.array(list(law.values()))))
    assert p_values[-1] > 1e-3, p_values


@pytest.mark.parametrize("min_tokens", [5, 14, 20])
def test_closing_completes_outputs_with_min_tokens(engine, min_tokens):
    """A stop id comes before `min_tokens` only where no other token is legal."""
    requests = []
    for pattern, options in itertools.product(PATTERNS, MODES[:3]):
        request = pattern_request(pattern, 20, seed=2, closing="require", **options)
        requests.append(replace(request, min_tokens=min_tokens))
    outputs = engine.generate(requests)
    for request, output in zip(requests, outputs, strict=True):
        check_complete(request, output)
        assert len(output.tokens) > min_tokens or len(output.tokens) == 20


def test_closing_with_several_stop_ids(engine):
    """Any stop id without text completes the output; one with text makes it not guaranteed."""
    [stop] = engine.tokenizer.stop_ids[:1]
    special = next(
        token
        for token, added in engine.tokenizer.backend.get_added_tokens_decoder().items()
        if added.special and token not in engine.tokenizer.stop_ids
    )
    bias = {special: 50.0, stop: -50.0}
    request = pattern_request(PATTERNS[0], 14, closing="require", logit_bias=bias)
    [output] = engine.generate([replace(request, stop_ids=[special])])
    check_complete(request, output)
    assert output.tokens[-1] == special
    text_stop = output.tokens[1]
    plain = replace(request, stop_ids=[text_stop], logit_bias={text_stop: 50.0})
    [refused] = engine.generate([plain])
    assert (refused.reason, refused.error_param) == ("refused", "closing")
    assert "stop_ids" in refused.error
    [output] = engine.generate([replace(plain, closing="auto")])
    assert (output.closing, output.satisfies_grammar) == ("not guaranteed", False)


def test_closing_with_excluded_ids_is_not_guaranteed(engine):
    request = pattern_request(PATTERNS[0], 30, banned_ids=[7], closing="require")
    [output] = engine.generate([request])
    assert (output.reason, output.error_param) == ("refused", "closing")
    assert "banned_ids" in output.error
    [output] = engine.generate([replace(request, closing="auto")])
    assert (output.reason, output.closing) == ("stop", "not guaranteed")


def test_closing_is_not_guaranteed_without_distance():
    with settled(demo_engine(grammar_backend="xgrammar")) as engine:
        request = pattern_request(PATTERNS[0], 12)
        [output] = engine.generate([request])
        assert (output.reason, output.closing) == ("length", "not guaranteed")
        [output] = engine.generate([replace(request, closing="require")])
        assert (output.reason, output.error_param) == ("refused", "closing")
        assert "does not know" in output.error


def test_stop_string_ends_output_that_would_close(engine):
    request = pattern_request(PATTERNS[0], 14, closing="require")
    [output] = engine.generate([replace(request, stop=['"name"'])])
    assert (output.reason, output.closing, output.finished) == ("stop_string", "guaranteed", False)


def test_closing_counts_tokens_before_preemption_and_migration(engine):
    """Preempted and migrated requests have the same outputs: the budget counts all tokens."""
    requests = []
    for request in budget_requests(MODES[:2], 6):
        requests.append(replace(request, id=f"{len(requests)}"))
    expected = [answer(output) for output in engine.generate(requests)]
    rng = np.random.default_rng(4)
    with settled(closing_engine(max_batch_size=3, draft_length=2)) as other:
        found = {}
        moved = set()
        for request in requests:
            engine.submit(request)
        while engine.busy or other.busy:
            for source in (engine, other):
                found |= final_outputs(source.step()) if source.busy else {}
            name = str(rng.integers(len(requests)))
            engine.preempt(name)
            other.preempt(name)
            names = sorted(engine._scheduler.unfinished)
            if names and rng.random() < 0.7:
                name = str(rng.choice(names))
                migrated = engine.migrate_out(name)
                found |= final_outputs(engine.step()) if engine.busy else {}
                other.migrate_in(migrated)
                moved.add(name)
    assert len(moved) > 3
    assert sum(output.preempted for output in found.values()) > 1
    assert [answer(found[str(request.id)]) for request in requests] == expected
    assert {output.closing for output in found.values()} == {"guaranteed"}


#: Structural formats, and whether they have free text that may end anywhere.
FORMATS = [
    ({"type": "any_text"}, True),
    ({"type": "any_text", "excludes": ["q"]}, True),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": [
                {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
            ],
        },
        True,
    ),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
                {"type": "json_schema", "json_schema": {"enum": ["yes", "no"]}},
            ],
        },
        False,
    ),
]


@pytest.mark.parametrize("form, is_free", FORMATS)
@pytest.mark.full("form1", "form2")
def test_closing_leaves_free_text_to_be_cut_off(form, is_free):
    """By default, free text ends with "length" at `max_tokens`; text within tags is closed."""
    spec = GrammarSpec.structural_format(form)
    with demo_engine(max_batch_size=2) as engine:
        request = Request(tokens=PROMPT, grammar=spec, max_tokens=24, temperature=3.0, seed=1)
        # min_tokens: the text does not end by itself.
        [output] = engine.generate([replace(request, min_tokens=24)])
        assert output.closing == ("off" if is_free else "guaranteed")
        assert output.reason == ("length" if is_free else "stop")
        [required] = engine.generate([replace(request, min_tokens=24, closing="require")])
        assert (required.reason, required.closing) == ("stop", "guaranteed")
        assert len(required.tokens) == 24 or not is_free
