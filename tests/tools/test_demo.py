"""The demo: its tasks, template, tokenizer and prompts; checks of outputs, and its evaluation."""

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
from graft.models.request import Output
from graft.tools import demo, demo_tasks
from graft.tools.bench import demo_evaluation as evaluate_demo
from graft.tools.demo_prompts import demo_prompts, llm_prompts
from graft.tools.train import tasks as train_tasks
from graft.tools.validity import is_valid

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def keys_of(schema: Any) -> Iterator[str]:
    """All property names of a schema, nested ones too."""
    if isinstance(schema, dict):
        for key, sub in schema.get("properties", {}).items():
            yield key
            yield from keys_of(sub)
        yield from keys_of(schema.get("items"))


@pytest.fixture(scope="module")
def training() -> list[demo_tasks.Task]:
    return list(itertools.islice(train_tasks.training_tasks(), 1500))


@pytest.fixture(scope="module")
def held_out() -> list[demo_tasks.Task]:
    return demo_tasks.held_out_tasks(500)


@pytest.fixture(scope="module")
def unseen() -> list[demo_tasks.Task]:
    return demo_tasks.unseen_key_tasks(300)


def test_a_seed_names_the_same_tasks_for_good(held_out):
    """Drawing again gives equal tasks, another seed gives others."""
    assert demo_tasks.held_out_tasks(500) == held_out
    assert demo_tasks.held_out_tasks(50, seed=1) != held_out[:50]
    assert demo_tasks.make_task(random.Random(5)) == demo_tasks.make_task(random.Random(5))


def test_answers_obey_their_schema_in_property_order(training, held_out, unseen):
    """jsonschema accepts every answer, keys stand in schema order, text is canonical; no other key
    is allowed."""
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


def test_regex_answers_match_their_pattern(held_out):
    """The pattern of a regex task covers the whole answer, which stands in the text."""
    tasks = [t for t in held_out if t.kind == "regex"]
    assert len(tasks) > 20
    for task in tasks:
        assert re.fullmatch(task.pattern, task.answer) and task.answer in task.text


def test_string_values_can_be_read_off_the_text(held_out):
    """Every string in an extracted record occurs verbatim in its text."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for child in value.values() if isinstance(value, dict) else value:
                yield from strings(child)

    for task in held_out:
        if task.kind == "record":
            assert all(s in task.text for s in strings(json.loads(task.answer)))


def test_training_has_neither_held_out_prompts_nor_unseen_keys(training, held_out, unseen):
    """No held-out prompt is met in training; keys of the unseen set are all reserved, those of
    training never are."""
    seen = {(t.text, json.dumps(t.schema)) for t in training}
    assert all((t.text, json.dumps(t.schema)) not in seen for t in held_out + unseen)
    used = {k for t in training for k in keys_of(t.schema)}
    new = {k for t in unseen for k in keys_of(t.schema)}
    assert len(new) > 100 and not used & new
    assert all(demo_tasks.is_reserved(k) for k in new)
    assert not any(demo_tasks.is_reserved(k) for k in used)


def test_all_kinds_of_schema_occur(held_out):
    """Nested objects, arrays, enums, bounds, patterns, optional fields, regexes, free text."""
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


def test_scoring_counts_leaves_and_whole_answers(held_out):
    """Right, wrong, missing, surplus and broken answers get the score they deserve; each task's own
    answer scores all of its fields, and no other's scores whole."""
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
        right, total, whole = score(task.answer, task)
        assert right == total > 0 and whole
        if task.answer != other.answer:
            assert not score(other.answer, task)[2]


@functools.cache
def template() -> jinja2.Template:
    config = json.loads((DEMO / "target" / "tokenizer_config.json").read_text())
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(config["chat_template"])


def render(text: str, **given: Any) -> str:
    return template().render(
        messages=[{"role": "user", "content": text}], add_generation_prompt=True, **given
    )


def test_the_template_names_keys_and_types():
    """A schema becomes one line of nested key names, type hints and optional marks."""
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
def test_the_template_renders_any_schema(schema):
    """Odd, recursive and even invalid schemas give a prompt, never an error."""
    text = render("Hi.", schema=schema)
    assert text.startswith("<|begin|><|user|>Hi.\nSchema: ") and text.endswith("<|assistant|>")


def test_the_template_keeps_huge_schemas_short():
    """Breadth and depth are cut: a schema of a million leaves costs 600 characters at most."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        schema = {"type": "object", "properties": {f"key{i}": schema for i in range(30)}}
    assert len(render("Hi.", schema=schema)) < 700


def test_prompts_are_short_and_every_text_survives_the_tokenizer(held_out):
    """Prompt and answer fit 320 tokens and decoding gives back every text, odd ones too."""
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
    for odd in ("\x00\x01\x7f", "naïve café", "日本語 🎉", "\t\r\n  \n", "a" * 300):
        assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


def test_the_package_is_small_and_drafts_can_end():
    """Shapes and maps are checked when a model is loaded; the end is among what is drafted, and all
    files are below 12 MB."""
    target = json.loads((DEMO / "target" / "config.json").read_text())
    with safetensors.safe_open(DEMO / "eagle3" / "model.safetensors", "np") as tensors:
        d2t = tensors.get_tensor("d2t")
    assert target["eos_token_id"] in d2t + range(len(d2t)) and len(d2t) < target["vocab_size"]
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) < 12_000_000


def test_demo_prompts_have_grammars_of_their_own_and_right_answers():
    """At least eight different schemas, one expression, one free request; answers obey them."""
    prompts = demo_prompts()
    schemas = [p.grammar.text for p in prompts if p.grammar and p.grammar.kind == "json_schema"]
    assert len(schemas) >= 8 and len(set(schemas)) == len(schemas)
    assert [p.grammar is None for p in prompts].count(True) == 1
    assert [p.grammar.kind for p in prompts if p.grammar].count("regex") == 1
    for prompt in prompts:
        assert is_valid(prompt.grammar, prompt.answer) in (True, None), prompt.shows


def test_the_real_models_prompts_have_grammars_and_say_their_schemas():
    """Ten of them, as many kinds as applications have; a schema stands in the words as well."""
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
    for text, reason in (
        (prompt.answer.replace("QF-5702", "5702"), "stop"),
        (prompt.answer, "length"),
        ("", "refused"),
    ):
        wrong = Output(id="0", text=text, reason=reason, error="no" * (not text))
        assert demo.verdict(prompt, wrong)[0] is False


def result_of(tasks, texts, rounds=2):
    """An evaluation result whose outputs have these texts."""
    outputs = [
        Output(id=str(i), text=text, reason="stop", tokens=[1] * len(text), rounds=rounds)
        for i, text in enumerate(texts)
    ]
    return evaluate_demo.Result(tasks, outputs, {}, 1.0)


def test_right_answers_score_one_and_wrong_ones_less():
    """The generator's own answers score 100 %; one wrong field costs that field and its answer."""
    tasks = demo_tasks.held_out_tasks(40)
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


def test_paired_differences_are_of_guided_tasks():
    """Tasks without a grammar are left out; the difference is masked minus unmasked."""
    tasks = demo_tasks.held_out_tasks(60)
    guided = sum(task.schema is not None or task.pattern is not None for task in tasks)
    assert guided < 60
    paired = evaluate_demo.pair(*(result_of(tasks, ["abcd"] * 60, rounds) for rounds in (1, 2)))
    difference = paired["tokens_per_round_difference"]
    assert (difference["n"], paired["same_tokens"]) == (guided, 60)
    assert difference["mean"] == pytest.approx(2.0)
