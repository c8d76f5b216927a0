"""Tests of the server with models that write unexpected text: responses satisfy the constraint.

Each row of `ROWS` is a text that a scripted model writes whatever the request is. For example, the
text has no reasoning section, ends within the section, or is JSON of another schema. Each column of
`COLUMNS` is a constraint of the request, with a check of the response by jsonschema and re. Each
configuration of `CONFIGURATIONS` is a server. Every test sends all rows with all columns to one
server.

To add a behaviour, add a row; the checks derive the expected response from the text. To add a
format of tool calls, add a configuration with its settings, for example ``tool_call_parser``. Then
add rows with the name of the configuration in `only` and the expected call in `call`. Rows without
`only` are also sent to the new configuration, except for those with `call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_model import Script, write_scripted_model

from graft.models import Engine

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")

from serving_util import open_async_client, response_format, run_server  # noqa: E402

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
PARAMETERS = {"weather": CITY, "person": PERSON}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
#: Added tokens, which are special or not, depending on the configuration.
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ADDED = {"[TOOL_CALLS]": True, "[ARGS]": True, "<|python_tag|>": True}
BEGIN, END = "<think>", "</think>"
STOP_STRING = "STOP"
MAX_TOKENS = 160


@dataclass(frozen=True)
class Row:
    """A text that a model writes.

    Attributes
    ----------
    text
        The text. It is repeated endlessly if `stop` is empty.
    stop, spelled
        As in `Script`.
    call
        Name and arguments of the tool call in the text; None if there is none.
    begin
        Text with which the call begins.
    fields
        Fields of the requests, such as ``stop``.
    only
        Names of the configurations that use this row. Empty: all configurations use it or, if the
        row has a call, those that read the calls of the Hermes models.
    """

    text: str
    stop: str = "<eos>"
    spelled: bool = False
    call: tuple[str, dict[str, Any]] | None = None
    begin: str = "<tool_call>"
    fields: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of a call as the Hermes models write it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


CALL = ("weather", {"city": "Bonn", "days": 2})
WRONG_CALL = ("weather", {"town": "Rome", "days": "two"})
ROWS = {
    "prose": Row('Sure! Here is the JSON: {"foo": 1} Done.'),
    "other schema": Row('{"answer": 42, "ok": true}'),
    "valid JSON": Row('{"name": "Ann", "age": 31}'),
    "array": Row('[{"name": "x"}]'),
    "reasons, then valid JSON": Row('<think>I check it.</think>\n{"name": "Bo", "age": 7}'),
    "reasons, then prose": Row("<think>Hm, so.</think>The answer is red."),
    "reasons in other words": Row('<think>{"name": 1}</think>red'),
    "white space before reasoning": Row('\n <think>Ok.</think>{"name": "Cy", "age": 8}'),
    "ends inside reasoning": Row("<think>Let me see what"),
    "ends reasoning that did not begin": Row('So it is.</think>{"name": "Di", "age": 9}'),
    "repeats": Row("and on ", stop=""),
    "repeats in reasoning": Row("<think>round ", stop=""),
    "CJK and emoji": Row('<think>日本語で考える 🤔</think>{"name": "山田👍🏽太郎", "age": 40}'),
    "emoji without reasoning": Row("👩‍👩‍👧 привет, мир 🌍!"),
    "second stop id": Row('{"name": "Ed", "age": 5}', stop="<eot>"),
    "third stop id": Row("<think>a b</think>green", stop="<end>"),
    "stop string": Row(
        '{"name": "some STOP text", "age": 6}', fields={"stop": [STOP_STRING, "never"]}
    ),
    "choice": Row("green"),
    "regular expression": Row("abc12"),
    "call": Row(call_text(*CALL), call=CALL),
    "spelled call": Row(
        call_text("person", {"name": "Flo", "age": 1}),
        spelled=True,
        call=("person", {"name": "Flo", "age": 1}),
    ),
    "wrong call": Row(call_text(*WRONG_CALL)),
    "reasons, then calls": Row(f"<think>Call it.</think>{call_text(*CALL)}", call=CALL),
    "calls inside reasoning": Row(f"<think>Maybe {call_text(*WRONG_CALL)}"),
    "call after text": Row(f"I look. {call_text(*CALL)}", call=CALL, stop="<eot>"),
}


def row_of_format(only: str, text: str, begin: str, **fields: Any) -> Row:
    """Return a row with `CALL` in the notation of a configuration."""
    return Row(text, call=CALL, begin=begin, only=(only,), **fields)


LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Bonn", "days": 2}}'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
PYTHON_CALL = '[weather(city="Bonn", days=2)]'
ROWS |= {
    "Llama: call": row_of_format("llama3_json", LLAMA_CALL, '{"name"'),
    "Llama: call after text": row_of_format("llama3_json", f"Ok. {LLAMA_CALL}", '{"name"'),
    "Llama: special token": row_of_format(
        "llama3_json", f"<|python_tag|>{LLAMA_CALL}", "<|python_tag|>", stop="<eot>"
    ),
    "Mistral: call": row_of_format(
        "mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Bonn", "days": 2}', "[TOOL_CALLS]"
    ),
    "Mistral: spelled array": row_of_format(
        "mistral",
        f"Ok. [TOOL_CALLS] [{LLAMA_CALL.replace('parameters', 'arguments')}]",
        "[TOOL_CALLS]",
        spelled=True,
    ),
    "Qwen3-Coder: reasons, then calls": row_of_format(
        "qwen3_coder", f"<think>Call it.</think>{XML_CALL}", "<tool_call>"
    ),
    "Qwen3-Coder: call after text": row_of_format(
        "qwen3_coder", f"Ok:\n{XML_CALL}", "<tool_call>", stop="<end>"
    ),
    "Python: call": row_of_format("pythonic", PYTHON_CALL, "["),
    "Python: single quotes": row_of_format("pythonic", PYTHON_CALL.replace('"', "'"), "["),
}


@dataclass(frozen=True)
class Configuration:
    """A configuration of a server.

    Attributes
    ----------
    parser
        Reasoning parser.
    opened
        Whether the prompt ends with `BEGIN`.
    drafts
        Whether the engine speculates. The model is its own drafter, so rounds have many tokens.
    settings
        Further settings of the server.
    hermes
        Whether the server reads the calls of the Hermes models.
    closes
        Whether the model can end a call that the grammar forces. It only knows how JSON ends.
    """

    parser: str | None = None
    opened: bool = False
    drafts: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    hermes: bool = True
    closes: bool = True
    special: bool = False
    without: tuple[str, ...] = ()


CONFIGURATIONS = {
    "no parser": Configuration(),
    "qwen3": Configuration("qwen3", drafts=True),
    "deepseek_r1": Configuration("deepseek_r1"),
    # The text omits special tokens that a request does not name, so these outputs lose tags.
    "qwen3, special tags": Configuration(
        "qwen3", special=True, without=("text", "ends reasoning that did not begin")
    ),
    "qwen3 opened": Configuration("qwen3", opened=True, drafts=True),
    "no parser, drafts": Configuration(drafts=True),
    "qwen3, no drafts": Configuration("qwen3"),
    "deepseek_r1, drafts": Configuration("deepseek_r1", drafts=True),
    "llama3_json": Configuration(settings={"tool_call_parser": "llama3_json"}, hermes=False),
    "mistral": Configuration(settings={"tool_call_parser": "mistral"}, hermes=False),
    "qwen3_coder": Configuration(
        "qwen3",
        drafts=True,
        settings={"tool_call_parser": "qwen3_coder"},
        hermes=False,
        closes=False,
    ),
    "pythonic": Configuration(drafts=True, settings={"tool_call_parser": "pythonic"}, hermes=False),
}
#: Configurations that only the full run includes.
EXTRA = (
    *(
        "no parser",
        "deepseek_r1",
        "qwen3 opened",
        "no parser, drafts",
        "qwen3, no drafts",
        "deepseek_r1, drafts",
    ),
    *("qwen3, special tags", "llama3_json", "mistral", "qwen3_coder", "pythonic"),
)


@dataclass
class Answer:
    """A response, streamed or not, and the text that the model would write without a constraint.

    `reasoning_text` and `answer_text` are the parts of this text.
    """

    row: Row
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str
    reasoning_text: str
    answer_text: str
    closes: bool = True


def split_text(text: str, configuration: Configuration) -> tuple[str, str]:
    """Return the reasoning section and the answer of an output."""
    if configuration.parser is None:
        return "", text
    begins = re.match(r"[ \t\r\n]{0,16}<think>", text)
    if begins is None and not configuration.opened and configuration.parser == "qwen3":
        return "", text
    reasoning, _, answer = text[begins.end() if begins else 0 :].partition(END)
    return reasoning, re.sub(r"^[ \t\r\n]{0,16}", "", answer)


def is_json(text: str, schema: Any) -> bool:
    """Return whether a text is JSON that satisfies a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_call(name: str, arguments: str) -> bool:
    """Return whether a function with this name accepts the arguments."""
    return name in PARAMETERS and is_json(arguments, PARAMETERS[name])


def check_text(answer: Answer, is_valid: Callable[[str], bool]) -> None:
    """Check a response whose content must satisfy a constraint."""
    assert not answer.calls
    if answer.finish_reason == "length":
        # Only an output that is still in its reasoning section does not end by itself.
        assert not answer.row.stop and not answer.content
        return
    assert answer.finish_reason == "stop"
    if "stop" in answer.row.fields and not is_valid(answer.content):
        # A stop string ends the output anywhere, also within the reasoning section.
        text, found, _ = answer.row.text.partition(STOP_STRING)
        assert found and text in (answer.content, answer.reasoning)
        return
    assert is_valid(answer.content), answer
    if is_valid(answer.answer_text) and answer.row.stop:
        assert answer.content == answer.answer_text


def check_free(answer: Answer) -> None:
    """Check a response without a constraint: the text of the row is complete."""
    text, reasoning = answer.answer_text, answer.reasoning_text
    if not answer.row.spelled:
        for name, is_special in ADDED.items():
            text = text.replace(name, "") if is_special else text
    assert answer.finish_reason == ("stop" if answer.row.stop else "length")
    if STOP_STRING in text and "stop" in answer.row.fields:
        text = text.partition(STOP_STRING)[0]
    if STOP_STRING in reasoning and "stop" in answer.row.fields:
        reasoning = reasoning.partition(STOP_STRING)[0]
    if answer.row.stop:
        assert (answer.content, answer.reasoning) == (text, reasoning)
    else:
        assert answer.content.startswith(text) and answer.reasoning.startswith(reasoning)


def check_calls(answer: Answer, names: tuple[str, ...]) -> None:
    """Check a response that must be a call."""
    assert not answer.content
    if "stop" in answer.row.fields and STOP_STRING in answer.reasoning_text:
        assert answer.finish_reason == "stop" and not answer.calls
        return
    if answer.finish_reason == "length":
        assert not answer.row.stop or not answer.closes
        for name, arguments in answer.calls:  # a streamed call may be incomplete
            assert name in names and not is_json(arguments, {})
        return
    assert answer.calls and answer.finish_reason in ("tool_calls", "stop")
    for name, arguments in answer.calls:
        assert name in names and is_call(name, arguments)


def check_auto(answer: Answer) -> None:
    """Check a response that may have calls: they are valid, and no text is lost."""
    if answer.finish_reason == "length" and answer.row.stop and not answer.closes:
        assert not any(is_json(arguments, {}) for _, arguments in answer.calls)
        return
    for name, arguments in answer.calls:
        assert is_call(name, arguments)
    if answer.calls:
        assert answer.finish_reason == "tool_calls"
        if answer.row.call is not None:
            [(name, arguments)] = answer.calls
            assert (name, json.loads(arguments)) == answer.row.call
            assert answer.content == answer.answer_text.partition(answer.row.begin)[0]
    elif "<tool_call>" not in answer.answer_text:
        check_free(answer)
    else:
        assert answer.row.call is None


REGEX = "[a-z]{2,5}[0-9]{1,3}"
#: Fields of the request, and the check of the response.
COLUMNS: dict[str, tuple[dict[str, Any], Callable[[Answer], None]]] = {
    "text": ({}, check_free),
    "response_format": (
        {"response_format": response_format(PERSON)},
        functools.partial(check_text, is_valid=functools.partial(is_json, schema=PERSON)),
    ),
    "json_object": (
        {"response_format": {"type": "json_object"}},
        functools.partial(
            check_text, is_valid=functools.partial(is_json, schema={"type": "object"})
        ),
    ),
    "choice": (
        {"structured_outputs": {"choice": ["red", "green"]}},
        functools.partial(check_text, is_valid=("red", "green").__contains__),
    ),
    "regex": (
        {"structured_outputs": {"regex": REGEX}},
        functools.partial(check_text, is_valid=re.compile(REGEX).fullmatch),
    ),
    "tools auto": ({"tools": TOOLS}, check_auto),
    "tools required": (
        {"tools": TOOLS, "tool_choice": "required"},
        functools.partial(check_calls, names=tuple(PARAMETERS)),
    ),
    "tools named": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        functools.partial(check_calls, names=("weather",)),
    ),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A function that returns the engine of a configuration.

    A model with fewer scripts is smaller, so only configurations with rows of their own use the
    model that knows all rows.
    """
    stops = ("<eos>", "<eot>", "<end>")
    with contextlib.ExitStack() as opened:

        @functools.cache
        def model(special: bool, all_rows: bool) -> Any:
            folder = tmp_path_factory.mktemp("behaviours")
            added = ADDED | dict.fromkeys(TAGS, special)
            scripts = {
                name: Script(row.text, row.stop, spelled=row.spelled)
                for name, row in ROWS.items()
                if all_rows or not row.only
            }
            return write_scripted_model(folder, scripts, added=added, stops=stops)

        @functools.cache
        def engine(drafts: bool, special: bool, all_rows: bool) -> Engine:
            folder = model(special, all_rows)
            drafter = folder if drafts else None
            return opened.enter_context(Engine(folder, drafter, max_batch_size=8, max_length=512))

        yield engine


async def ask(client: Any, name: str, fields: dict[str, Any], stream: bool, opened: bool) -> Any:
    """Send a request, and return content, reasoning, calls and finish reason."""
    extra = {"chat_template_kwargs": {"open_reasoning": opened}}
    fields = {**fields, **ROWS[name].fields}
    if "structured_outputs" in fields:
        extra["structured_outputs"] = fields.pop("structured_outputs")
    response = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"<script:{name}>"}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=stream,
        extra_body=extra,
        **fields,
    )
    if not stream:
        [choice] = response.choices
        message = choice.message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning_content", None) or ""
        return message.content or "", reasoning, calls, choice.finish_reason
    content = reasoning = finish_reason = ""
    calls = []
    async for chunk in response:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                calls.append((call.function.name, ""))
            called, arguments = calls[call.index]
            calls[call.index] = (called, arguments + (call.function.arguments or ""))
        finish_reason = choice.finish_reason or finish_reason
    return content, reasoning, calls, finish_reason


async def check_table(url: str, name: str, parity: int, step: int) -> list[str]:
    """Send rows with columns, half of them streamed; return the cases that fail.

    With a `step` of 3, each row is sent with every third column. With 1, all pairs are sent.
    """
    configuration = CONFIGURATIONS[name]
    rows = []
    for row_name, row in ROWS.items():
        is_left_out = row_name in configuration.without or (row.call and not configuration.hermes)
        if name in row.only or not (row.only or is_left_out):
            rows.append(row_name)
    columns = [column for column in COLUMNS if column not in configuration.without]
    slots = asyncio.Semaphore(16)

    async def check(client: Any, row: str, column: str, stream: bool) -> str:
        fields, check_answer = COLUMNS[column]
        async with slots:
            parts = await ask(client, row, fields, stream, configuration.opened)
        text = ROWS[row].text
        sections = split_text(text, configuration)
        answer = Answer(ROWS[row], *parts, *sections, closes=configuration.closes)
        try:
            check_answer(answer)
        except AssertionError as error:
            return f"{row} / {column} / {stream=}: {parts} {error}"
        return ""

    async with open_async_client(url) as client:
        failures = await asyncio.gather(
            *(
                check(client, row, column, (i + j) % 2 == parity)
                for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns))
                if (i + j) % step == 0
            )
        )
    return [failure for failure in failures if failure]


@pytest.mark.parametrize("parity, step", [(0, 3), (0, 1), (1, 1)])
@pytest.mark.full("-1]")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name in EXTRA else name
        for name in CONFIGURATIONS
    ],
)
def test_server_answers_with_constrained_output(engines, name, parity, step):
    configuration = CONFIGURATIONS[name]
    has_own_rows = any(name in row.only for row in ROWS.values())
    engine = engines(configuration.drafts, configuration.special, has_own_rows)
    settings = {"reasoning_parser": configuration.parser, **configuration.settings}
    with run_server(engine, **settings) as server:
        failures = asyncio.run(check_table(server.url, name, parity, step))
    assert not failures, "\n".join(failures)
