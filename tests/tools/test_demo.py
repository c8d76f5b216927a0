"""Tests of the demo: its tasks, chat template, tokenizer, prompts, output checks and evaluation."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import pytest
import safetensors
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.stats import EngineStats
from graft.models.request import Output
from graft.tools.bench import demo_evaluation as evaluate_demo
from graft.tools.demo import command as demo
from graft.tools.demo import tasks as demo_tasks
from graft.tools.demo.prompts import demo_prompts, llm_prompts
from graft.tools.output_check import is_valid
from graft.tools.train import tasks as train_tasks

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def property_names(schema: Any) -> Iterator[str]:
    """Yield all property names of a schema, including nested ones."""
    if isinstance(schema, dict):
        for key, sub in schema.get("properties", {}).items():
            yield key
            yield from property_names(sub)
        yield from property_names(schema.get("items"))


@pytest.fixture(scope="module")
def training() -> list[demo_tasks.Task]:
    return list(itertools.islice(train_tasks.training_tasks(), 1500))


@pytest.fixture(scope="module")
def held_out() -> list[demo_tasks.Task]:
    return demo_tasks.held_out_tasks(500)


@pytest.fixture(scope="module")
def unseen() -> list[demo_tasks.Task]:
    return demo_tasks.unseen_key_tasks(300)


def test_demo_tasks_are_deterministic(held_out):
    """Equal seeds give equal tasks, and different seeds give different tasks."""
    assert demo_tasks.held_out_tasks(500) == held_out
    assert demo_tasks.held_out_tasks(50, seed=1) != held_out[:50]
    assert demo_tasks.make_task(random.Random(5)) == demo_tasks.make_task(random.Random(5))


def test_demo_task_answers_satisfy_their_schemas(training, held_out, unseen):
    """The answer of a task is valid under the task's schema.

    The keys of the answer have the order of the schema, and the schema allows no additional keys.
    The answer has the format of ``json.dumps``.
    """
    for task in itertools.chain(training, held_out, unseen):
        if task.schema is None:
            continue
        value = json.loads(task.answer)
        validator = jsonschema.Draft202012Validator(task.schema)
        assert not list(validator.iter_errors(value))
        assert task.answer == json.dumps(value)
        if "properties" not in task.schema:
            continue
        assert list(value) == [k for k in task.schema["properties"] if k in value]
        assert task.schema["additionalProperties"] is False


def test_corpus_task_answers_satisfy_their_schemas():
    """The elements of lists may differ, and lists may be empty."""
    documents = [
        {"a": [1, "x"]},
        {"a": [1, 2.5, None]},
        {"a": [{"b": 1}, {"c": [1]}]},
        {"a": [[1], [], ["x"]], "b": []},
        {"a": [{"b": [1, "x"]}, {"b": ["x", 1, 1]}], "c": {"d": [True, 0]}},
    ]
    for document, seed in itertools.product(documents, range(20)):
        task = train_tasks.corpus_task(random.Random(seed), document)
        jsonschema.validate(json.loads(task.answer), task.schema)


def test_demo_regex_task_answers_match_their_patterns(held_out):
    """The answer of a ``regex`` task matches the pattern and occurs in the text of the task."""
    tasks = [t for t in held_out if t.kind == "regex"]
    assert len(tasks) > 20
    for task in tasks:
        assert re.fullmatch(task.pattern, task.answer) and task.answer in task.text


def test_demo_record_task_strings_occur_in_the_text(held_out):

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for child in value.values() if isinstance(value, dict) else value:
                yield from strings(child)

    for task in held_out:
        if task.kind == "record":
            assert all(s in task.text for s in strings(json.loads(task.answer)))


def test_demo_training_excludes_held_out_prompts_and_unseen_keys(training, held_out, unseen):
    """No task of the held-out sets is a training task.

    All keys of the tasks with unseen keys are reserved: no training task uses them.
    """
    seen = {(t.text, json.dumps(t.schema)) for t in training}
    assert all((t.text, json.dumps(t.schema)) not in seen for t in held_out + unseen)
    used = {k for t in training for k in property_names(t.schema)}
    new = {k for t in unseen for k in property_names(t.schema)}
    assert len(new) > 100 and not used & new
    assert all(demo_tasks.is_unseen(k) for k in new)
    assert not any(demo_tasks.is_unseen(k) for k in used)


def test_demo_tasks_cover_all_kinds_of_schemas(held_out):
    """The schemas contain nested objects, arrays, enums, bounds, patterns and optional fields.

    Some tasks have a regular expression in place of a schema, and some have no grammar.
    """
    everything = " ".join(json.dumps(t.schema) for t in held_out)
    for part in (
        '"enum"',
        '"maximum"',
        '"pattern"',
        '"boolean"',
        '"number"',
        '"format"',
        '"items": {"type": "object"',
        '"items": {"type": "string"',
    ):
        assert part in everything
    assert {t.kind for t in held_out} == {"record", "regex", "free"}
    assert any(
        t.schema and len(t.schema["required"]) < len(t.schema["properties"]) for t in held_out
    )


def test_score_fields_counts_leaves_and_complete_answers(held_out):
    """Wrong, missing or additional fields lower the score, and so does text that is not JSON.

    Each task's own answer is scored as completely correct. The answer of another task is not.
    """
    task = demo_tasks.Task("", {}, '{"a": 1, "b": {"c": "x", "d": [1, 2]}}')
    score = demo_tasks.score_fields
    for text, found in (
        ('{"a": 1, "b": {"c": "x", "d": [1, 2]}}', (3, 3, True)),
        ('{"a": true, "b": {"c": "x", "d": [2, 1]}}', (1, 3, False)),
        ('{"a": 1}', (1, 3, False)),
        ("[]", (0, 3, False)),
        ('{"a": 1, "b": {"c": "x", "d": [1, 2], "e": 0}}', (3, 3, False)),
        ('{"a": 1, "b"', (0, 3, False)),
    ):
        assert score(text, task) == found
    assert score(" 12 ", demo_tasks.Task("", None, "12")) == (1, 1, True)
    assert score("13", demo_tasks.Task("", None, "12")) == (0, 1, False)
    for task, other in itertools.pairwise(held_out):
        correct, total, is_complete = score(task.answer, task)
        assert correct == total > 0 and is_complete
        if task.answer != other.answer:
            assert not score(other.answer, task)[2]


@functools.cache
def template() -> jinja2.Template:
    config = json.loads((DEMO / "target" / "tokenizer_config.json").read_text())
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(config["chat_template"])


def render(text: str, **variables: Any) -> str:
    return template().render(
        messages=[{"role": "user", "content": text}], add_generation_prompt=True, **variables
    )


def test_demo_template_renders_keys_and_types_of_schema():
    """The chat template renders a schema as one line of nested keys and types.

    Optional keys are marked with ``?``.
    """
    schema = demo_tasks.object_schema(
        [
            ("id", {"type": "string", "pattern": "^[A-Z]$"}),
            ("n", {"type": "integer"}),
            ("who", demo_tasks.object_schema([("name", {"type": "string"})])),
            ("tags", {"type": "array", "items": {"type": "string"}}),
            ("c", {"enum": ["x", "y"]}),
            ("r", {"$ref": "#/$defs/day"}),
        ],
        optional=["n"],
    )
    schema["$defs"] = {"day": {"type": "string", "format": "date"}}
    assert render("Hi.", schema=schema) == (
        "<|begin|><|user|>Hi.\nSchema: {id:pat, n?:int, who:{name}, tags:[str], c:(x|y), r:date}"
        "<|assistant|>"
    )
    assert render("Hi.", schema=None) == render("Hi.") == "<|begin|><|user|>Hi.<|assistant|>"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        [],
        "x",
        5,
        {"type": 5},
        {"type": []},
        {"type": ["string", "null"]},
        {"enum": {}},
        {"enum": []},
        {"const": None},
        {"properties": 3},
        {"properties": {"a": True}, "required": "a"},
        {"items": [{}]},
        {"items": True},
        {"$ref": "#"},
        {"$ref": 7},
        {"anyOf": []},
        {"anyOf": {}},
        {
            "allOf": [{"$ref": "#/definitions/x"}],
            "definitions": {"x": {"anyOf": [{"$ref": "#/definitions/x"}]}},
        },
        {"$defs": [], "$ref": "#/$defs/a"},
        {"properties": {"items": {}, "get": {}, "keys": {"format": 3}}},
    ],
    ids=json.dumps,
)
def test_demo_template_renders_any_schema(schema):
    """The template renders unusual, recursive and invalid schemas without an error."""
    text = render("Hi.", schema=schema)
    assert text.startswith("<|begin|><|user|>Hi.\nSchema: ") and text.endswith("<|assistant|>")


def test_demo_template_truncates_large_schemas():
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        schema = {"type": "object", "properties": {f"key{i}": schema for i in range(30)}}
    assert len(render("Hi.", schema=schema)) < 700


def test_demo_tokenizer_roundtrip_and_prompt_length(held_out):
    """The prompt and the answer of each task have fewer than 320 tokens in total.

    Decoding the encoded text returns the text, also for control characters and other scripts.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    config = json.loads((DEMO / "target" / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|end|>") == config["eos_token_id"]
    assert tokenizer.token_to_id("<|begin|>") == config["bos_token_id"]
    for task in held_out:
        prompt = tokenizer.encode(render(task.text, schema=task.schema)).ids
        answer = tokenizer.encode(task.answer).ids
        assert len(prompt) + len(answer) < 320
        assert tokenizer.decode(answer) == task.answer
    for text in ("\x00\x01\x7f", "naïve café", "日本語 🎉", "\t\r\n  \n", "a" * 300):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_demo_model_is_small_and_draft_vocabulary_has_stop_id():
    target = json.loads((DEMO / "target" / "config.json").read_text())
    with safetensors.safe_open(DEMO / "eagle3" / "model.safetensors", "np") as tensors:
        d2t = tensors.get_tensor("d2t")
    assert target["eos_token_id"] in d2t + range(len(d2t)) and len(d2t) < target["vocab_size"]
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) < 12_000_000


def test_demo_prompts_have_different_grammars_and_valid_answers():
    """Eight or more demo prompts have a schema, one a regular expression, and one no grammar."""
    prompts = demo_prompts()
    schemas = [p.grammar.text for p in prompts if p.grammar and p.grammar.kind == "json_schema"]
    assert len(schemas) >= 8 and len(set(schemas)) == len(schemas)
    assert [p.grammar is None for p in prompts].count(True) == 1
    assert [p.grammar.kind for p in prompts if p.grammar].count("regex") == 1
    for prompt in prompts:
        assert is_valid(prompt.grammar, prompt.answer) in (True, None), prompt.shows


def test_llm_prompts_have_all_kinds_of_grammars_and_contain_their_schemas():
    prompts = llm_prompts()
    kinds = [p.grammar.kind if p.grammar else None for p in prompts]
    assert [kinds.count(k) for k in ("json_schema", "choice", "regex", None)] == [5, 2, 1, 2]
    for prompt, kind in zip(prompts, kinds, strict=True):
        assert prompt.answer is None
        assert kind != "json_schema" or prompt.text.endswith(json.dumps(prompt.grammar.schema))


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec.json_schema({"type": "integer", "maximum": 9}), "9", "10"),
        (
            GrammarSpec.json_schema({"type": "string", "format": "date"}),
            '"2020-02-29"',
            '"2021-02-29"',
        ),
        (GrammarSpec.json_object(), "{}", "[]"),
        (GrammarSpec.json_object(), '{"a": 1}', '{"a": 1'),
        (GrammarSpec.regex("[0-9]{2}"), "12", "123"),
        (GrammarSpec.choice(["yes", "no"]), "no", "n"),
    ],
)
def test_is_valid_checks_outputs_independently_of_the_backend(spec, good, bad):
    assert (is_valid(spec, good), is_valid(spec, bad)) == (True, False)


def test_is_valid_returns_none_without_independent_check():
    """`is_valid` returns None for EBNF, free text and expressions that ``re`` cannot parse."""
    for spec in (GrammarSpec.regex(r"\p{L}+"), GrammarSpec.ebnf('root ::= "a"'), None):
        assert is_valid(spec, "a") is None


def test_check_demo_output_rejects_truncated_failed_and_invalid_outputs():
    prompt = next(p for p in demo_prompts() if p.shows == "pattern")
    correct = Output(id="0", text=prompt.answer, reason="stop")
    expected = (True, "valid (jsonschema); correct answer")
    assert demo.check_demo_output(prompt, correct) == expected
    for text, reason in (
        (prompt.answer.replace("QF-5702", "5702"), "stop"),
        (prompt.answer, "length"),
        ("", "refused"),
    ):
        wrong = Output(id="0", text=text, reason=reason, error="no" * (not text))
        assert demo.check_demo_output(prompt, wrong)[0] is False


@pytest.mark.parametrize(
    ("seconds", "effect"),
    [
        (5.0, "and 5.00 s instead of 10.00 s: 2.00 times as fast."),
        (20.0, "and 20.00 s instead of 10.00 s: 2.00 times as slow."),
        (9.8, "and 9.80 s instead of 10.00 s: about as fast."),
    ],
)
def test_describe_speculation_follows_from_measured_times(seconds, effect):
    speculative = demo.Configuration("a", [], EngineStats(row_rounds=30), seconds)
    baseline = demo.Configuration("b", [], EngineStats(row_rounds=90), 10.0)
    sentence = demo.describe_speculation(speculative, baseline)
    assert sentence == f"With speculation, the requests took 30 rounds instead of 90, {effect}"


def make_result(tasks, texts, rounds=2):
    """Return the evaluation result of a model that generates `texts`, one for each task."""
    outputs = [
        Output(id=str(i), text=text, reason="stop", tokens=[1] * len(text), rounds=rounds)
        for i, text in enumerate(texts)
    ]
    return evaluate_demo.Result(tasks, outputs, {}, 1.0)


def test_demo_evaluation_correctness_of_right_and_wrong_answers():
    """If all answers are correct, all rates are 1. A wrong field lowers the rates of correct
    fields, correct answers and valid outputs.
    """
    tasks = demo_tasks.held_out_tasks(40)
    texts = [task.answer for task in tasks]
    scores = evaluate_demo.correctness(make_result(tasks, texts))
    assert scores["correct_fields"] == scores["correct_answers"] == scores["valid"] == 1.0
    at = next(i for i, task in enumerate(tasks) if task.schema is not None)
    first = json.loads(texts[at])
    first[next(iter(first))] = None
    texts[at] = json.dumps(first)
    worse = evaluate_demo.correctness(make_result(tasks, texts))
    assert worse["correct_answers"] == pytest.approx(1 - 1 / 40)
    assert worse["correct_fields"] < 1.0 and worse["valid"] < 1.0
    cut = make_result(tasks, texts)
    cut.outputs[at].reason = "length"
    assert evaluate_demo.correctness(cut)["valid"] == 1.0


def test_demo_evaluation_compares_masking_on_tasks_with_grammar():
    """The difference in tokens per round is the value with masked drafts minus the value without.

    It is computed for the tasks with a grammar only.
    """
    tasks = demo_tasks.held_out_tasks(60)
    guided = sum(task.schema is not None or task.pattern is not None for task in tasks)
    assert guided < 60
    paired = evaluate_demo.compare_masking(
        *(make_result(tasks, ["abcd"] * 60, rounds) for rounds in (1, 2))
    )
    difference = paired["tokens_per_round_difference"]
    assert (difference["n"], paired["same_tokens"]) == (guided, 60)
    assert difference["mean"] == pytest.approx(2.0)


def test_demo_run_refuses_no_request(caplog):
    """The requests of the warm-up and of the measured run are all served."""
    prompts = [prompt for prompt in demo_prompts() if prompt.grammar is not None][:3]
    result = demo.run_configuration("plain", prompts, DEMO / "target")
    assert {output.reason for output in result.outputs} == {"stop"}
    assert not caplog.records
