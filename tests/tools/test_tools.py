"""The demo's prompts, the checks of outputs, and the arithmetic of the evaluation."""

from __future__ import annotations

import json
import math
import random

import pytest

from graft.grammar.statement import GrammarSpec
from graft.models.request import Output
from graft.tools import demo
from graft.tools.bench import demo_evaluation as evaluate_demo
from graft.tools.demo_prompts import demo_prompts
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.validity import is_valid


def test_demo_prompts_have_grammars_of_their_own_and_right_answers():
    """At least eight different schemas, one expression, one free request; answers obey them."""
    prompts = demo_prompts()
    schemas = [p.grammar.text for p in prompts if p.grammar and p.grammar.kind == "json_schema"]
    assert len(schemas) >= 8 and len(set(schemas)) == len(schemas)
    assert [p.grammar is None for p in prompts].count(True) == 1
    assert [p.grammar.kind for p in prompts if p.grammar].count("regex") == 1
    for prompt in prompts:
        assert is_valid(prompt.grammar, prompt.answer) in (True, None), prompt.shows


@pytest.mark.parametrize(("spec", "good", "bad"), [
    (GrammarSpec.json_schema({"type": "integer", "maximum": 9}), "9", "10"),
    (GrammarSpec.json_schema({"type": "string", "format": "date"}), '"2020-02-29"', '"2021-02-29"'),
    (GrammarSpec.json_object(), "{}", "[]"),
    (GrammarSpec.json_object(), '{"a": 1}', '{"a": 1'),
    (GrammarSpec.regex("[0-9]{2}"), "12", "123"),
])
def test_outputs_are_checked_by_other_means_than_the_grammar(spec, good, bad):
    """A right output passes and a wrong one does not, for each kind that has a second reader."""
    assert (is_valid(spec, good), is_valid(spec, bad)) == (True, False)


def test_what_has_no_second_reader_is_not_called_valid():
    """EBNF outputs, free text and expressions `re` cannot read are neither valid nor invalid."""
    for spec in (GrammarSpec.regex(r"\p{L}+"), GrammarSpec.ebnf('root ::= "a"'), None):
        assert is_valid(spec, "a") is None


def test_the_demo_does_not_pass_what_is_wrong():
    """The demo's verdict refuses cut, failed and invalid outputs and passes valid ones."""
    prompt = next(p for p in demo_prompts() if p.shows == "pattern")
    right = Output(id="0", text=prompt.answer, reason="stop")
    assert demo.verdict(prompt, right) == (True, "valid by jsonschema; right answer")
    for text, reason in ((prompt.answer.replace("QF-5702", "5702"), "stop"),
                         (prompt.answer, "length"), ("", "refused")):
        wrong = Output(id="0", text=text, reason=reason, error="no" * (not text))
        assert demo.verdict(prompt, wrong)[0] is False


def result_of(tasks, texts, rounds=2):
    """An evaluation result whose outputs have these texts."""
    outputs = [Output(id=str(i), text=text, reason="stop", tokens=[1] * len(text), rounds=rounds)
               for i, text in enumerate(texts)]
    return evaluate_demo.Result(tasks, outputs, {}, 1.0)


def test_right_answers_score_one_and_wrong_ones_less():
    """The generator's own answers score 100 %; one wrong field costs that field and its answer."""
    tasks = held_out_tasks(40)
    texts = [task.answer for task in tasks]
    scores = evaluate_demo.correctness(result_of(tasks, texts))
    assert scores["fields_right"] == scores["whole_right"] == scores["valid"] == 1.0
    at = next(i for i, task in enumerate(tasks) if task.schema is not None)
    first = json.loads(texts[at])
    first[next(iter(first))] = None
    texts[at] = json.dumps(first)
    worse = evaluate_demo.correctness(result_of(tasks, texts))
    assert worse["whole_right"] == pytest.approx(1 - 1 / 40)
    assert worse["fields_right"] < 1.0 and worse["valid"] < 1.0
    cut = result_of(tasks, texts)
    cut.outputs[at].reason = "length"
    assert evaluate_demo.correctness(cut)["valid"] == 1.0


def test_the_interval_covers_its_mean_as_often_as_it_says():
    """Of intervals over normal samples of known mean about 95 % cover it."""
    rng = random.Random(5)
    covered = 0
    for _ in range(1000):
        found = evaluate_demo.interval([rng.gauss(0.3, 2.0) for _ in range(200)])
        covered += found["low"] <= 0.3 <= found["high"]
    assert 0.95 - 4 * math.sqrt(0.95 * 0.05 / 1000) < covered / 1000 < 0.98


def test_paired_differences_are_of_guided_tasks():
    """Tasks without a grammar are left out; the difference is masked minus unmasked."""
    tasks = held_out_tasks(60)
    guided = sum(task.schema is not None or task.pattern is not None for task in tasks)
    assert guided < 60
    paired = evaluate_demo.pair(*(result_of(tasks, ["abcd"] * 60, rounds) for rounds in (1, 2)))
    difference = paired["tokens_per_round_difference"]
    assert (difference["n"], paired["same_tokens"]) == (guided, 60)
    assert difference["mean"] == pytest.approx(2.0)
