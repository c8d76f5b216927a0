"""Tests of tool calls in each notation. A scripted model writes and OpenAI's client reads them."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from scripted_model import Script, write_scripted_model

from graft.models.engine.engine import Engine
from graft.tools.serve.tool_formats import TOOL_FORMATS

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")

from serving_util import chat, open_client, run_server  # noqa: E402

SCHEMAS = {
    "town": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "more": {"type": "object", "additionalProperties": {"type": "array"}},
            "exact": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CITY = 'a "b" {c}] 東京'
FIRST = ("town", {"city": CITY, "more": {"x": [1, {"y": "}]"}]}, "exact": True})
SECOND = ("now", {"zone": "utc"})
_FIRST_JSON = json.dumps(FIRST[1], ensure_ascii=False)
_SECOND_JSON = json.dumps(SECOND[1])
_FIRST_OBJECT = f'{{"name": "town", "arguments": {_FIRST_JSON}}}'
_SECOND_OBJECT = f'{{"name": "now", "arguments": {_SECOND_JSON}}}'
_LLAMA = [one.replace('"arguments"', '"parameters"') for one in (_FIRST_OBJECT, _SECOND_OBJECT)]
_MORE_JSON = json.dumps(FIRST[1]["more"], ensure_ascii=False)
_XML = [
    f"<tool_call>\n<function=town>\n<parameter=city>\n{CITY}\n</parameter>\n"
    f"<parameter=more>\n{_MORE_JSON}\n</parameter>\n"
    "<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=now>\n<parameter=zone>\nutc\n</parameter>\n</function>\n</tool_call>",
]
_TAGGED = [f"<tool_call>\n{one}\n</tool_call>" for one in (_FIRST_OBJECT, _SECOND_OBJECT)]
_PYTHON_CITY = json.dumps(CITY, ensure_ascii=False)
_PYTHON = [f"town(city={_PYTHON_CITY}, more={_MORE_JSON}, exact=True)", 'now(zone="utc")']
#: By notation: the text of a call, and of two calls.
CASES = {
    "hermes": (_TAGGED[0], "\n".join(_TAGGED)),
    "llama3_json": (_LLAMA[0], "; ".join(_LLAMA)),
    "llama3_json/tag": (f"<|python_tag|>{_LLAMA[0]}", f"<|python_tag|>{'; '.join(_LLAMA)}"),
    "llama3_json/function": (
        f"<function=town>{_FIRST_JSON}</function>",
        f"<function=town>{_FIRST_JSON}</function>; <function=now>{_SECOND_JSON}</function>",
    ),
    "mistral": (
        f"[TOOL_CALLS]town{_FIRST_JSON}",
        f"[TOOL_CALLS]town{_FIRST_JSON}[TOOL_CALLS]now{_SECOND_JSON}",
    ),
    "mistral/args": (
        f"[TOOL_CALLS]town[ARGS]{_FIRST_JSON}",
        f"[TOOL_CALLS]town[ARGS]{_FIRST_JSON}[TOOL_CALLS]now[ARGS]{_SECOND_JSON}",
    ),
    "mistral/array": (
        f"[TOOL_CALLS][{_FIRST_OBJECT}]",
        f"[TOOL_CALLS] [{_FIRST_OBJECT}, {_SECOND_OBJECT}]",
    ),
    "qwen3_coder": (_XML[0], "\n".join(_XML)),
    "pythonic": (f"[{_PYTHON[0]}]", f"[{', '.join(_PYTHON)}]"),
}
#: Text before the calls.
BEFORE = "Well, 京:\n"
MARKERS = {"<tool_call>": False, "</tool_call>": False}
MARKERS |= {"[TOOL_CALLS]": True, "[ARGS]": True, "<|python_tag|>": True}
#: A call that no notation allows: the function is unknown, and then the arguments are wrong.
UNKNOWN = '<tool_call>\n{"name": "town2", "arguments": {"city": 1}}\n</tool_call>'


def scripts(form):
    """Return the scripts of a model that writes calls in one notation."""
    found = {"unknown": Script(UNKNOWN), "prose": Script("No call here, 京. [1] {2}")}
    for name, (one, two) in CASES.items():
        if name.split("/")[0] != form:
            continue
        key = name.replace("/", "-")
        found[f"{key}-one"] = Script(one)
        found[f"{key}-two"] = Script(two)
        if name in TOOL_FORMATS and name != "pythonic":
            found[f"{key}-text"] = Script(BEFORE + two)
        if any(marker in one for marker in MARKERS):
            found[f"{key}-spelled"] = Script(one, spelled=True)
    return found


@pytest.fixture(scope="module", params=sorted(TOOL_FORMATS))
def form(request):
    return request.param


@pytest.fixture(
    scope="module", params=["drafts", pytest.param("no drafts", marks=pytest.mark.full)]
)
def engine(request, form, tmp_path_factory):
    """Return an engine with a model that writes the notation.

    If the engine has drafts, the model is its own drafter. With drafts, the grammars run as
    automata on the device, in loops that have no host steps.
    """
    folder = write_scripted_model(tmp_path_factory.mktemp(form), scripts(form), added=MARKERS)
    has_drafts = request.param == "drafts"
    drafter, generation = (folder, "graph") if has_drafts else (None, "rounds")
    with Engine(folder, drafter, max_batch_size=8, max_length=512, generation=generation) as engine:
        yield engine
        assert bool(sum(engine.stats.accepted)) == has_drafts
        assert set(engine.stats.rounds_by_kind) == ({"loop"} if has_drafts else {"host"})


@pytest.fixture(scope="module")
def ask(form, engine):
    """Return a function that returns content, calls and finish reason of a response."""
    with run_server(engine, tool_call_parser=form) as server, open_client(server.url) as client:

        def ask(script, **fields):
            messages = [{"role": "user", "content": f"Write <script:{script}>"}]
            fields = {"tools": TOOLS, "max_tokens": 300, **fields}
            raw = fields.pop("raw", False)
            response = chat(client, messages=messages, **fields)
            if raw:
                return response
            return read_stream(response) if fields.get("stream") else read_response(response)

        ask.form = form
        ask.token_id = engine.tokenizer.backend.token_to_id
        yield ask


def markers_of(ask, script, **fields):
    """Return the names of special tokens among the generated tokens."""
    tokens = ask(script, return_token_ids=True, raw=True, **fields).choices[0].token_ids
    names = {ask.token_id(name): name for name, is_special in MARKERS.items() if is_special}
    return [names[token] for token in tokens if token in names]


def read_response(response):
    [choice] = response.choices
    calls = []
    for call in choice.message.tool_calls or []:
        calls.append((call.function.name, json.loads(call.function.arguments)))
    return choice.message.content, calls, choice.finish_reason


def read_stream(chunks):
    content = ""
    calls = {}
    num_pieces = 0
    for chunk in chunks:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            call = calls.setdefault(delta.index, [None, ""])
            call[0] = call[0] or delta.function.name
            call[1] += delta.function.arguments
            num_pieces += 1
    assert not calls or num_pieces > 2 * len(calls)  # arguments are sent in several pieces
    read = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return content or None, read, choice.finish_reason


def cases_of(form):
    return [name.replace("/", "-") for name in CASES if name.split("/")[0] == form]


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.full(
    "llama3_json",
    "qwen3_coder",
    "mistral-drafts-True-named",
    "mistral-drafts-True-required",
    "hermes-drafts-True-named",
)
def test_model_can_write_calls(ask, stream, choice):
    """Calls are the model's own text, whether they are required or not."""
    named = {"type": "function", "function": {"name": "town"}}
    fields = {"stream": stream, "tool_choice": named if choice == "named" else choice}
    one, both = (None, [FIRST], "tool_calls"), (None, [FIRST, SECOND], "tool_calls")
    for key in cases_of(ask.form):
        assert ask(f"{key}-one", **fields) == one
        assert ask(f"{key}-two", **fields) == (one if choice == "named" else both)
        assert ask(f"{key}-two", parallel_tool_calls=False, **fields) == one
        if f"{key}-spelled" in scripts(ask.form):
            assert ask(f"{key}-spelled", **fields) == one
        if f"{key}-text" in scripts(ask.form) and choice == "auto":
            assert ask(f"{key}-text", **fields) == (BEFORE, *both[1:])
            assert ask(f"{key}-text", parallel_tool_calls=False, **fields) == (BEFORE, *one[1:])
    text = scripts(ask.form)["prose"].text
    if choice == "auto":
        assert ask("prose", **fields) == (text, [], "stop")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.full("llama3_json", "mistral", "pythonic", "qwen3_coder")
def test_output_ends_after_one_call_without_parallel_calls(ask, choice):
    for key in cases_of(ask.form):
        sizes = []
        for parallel in (True, False):
            fields = {"tool_choice": choice, "parallel_tool_calls": parallel}
            sizes.append(ask(f"{key}-two", raw=True, **fields).usage.completion_tokens)
        assert sizes[1] <= sizes[0] - 4


@pytest.mark.full("llama3_json", "qwen3_coder", "mistral", "pythonic")
def test_calls_satisfy_the_schemas_whatever_the_model_writes(ask):
    """The script of the model is prose, or a call to an unknown function."""
    for script in ("unknown", "prose"):
        for choice in ("auto", "required"):
            content, calls, reason = ask(script, tool_choice=choice)
            for name, arguments in calls:
                jsonschema.validate(arguments, SCHEMAS[name])
            assert (reason == "tool_calls") == bool(calls)
            assert calls or choice == "auto"
            assert content or calls


@pytest.mark.full("llama3_json", "pythonic", "qwen3_coder")
def test_required_call_is_complete_within_max_tokens(ask):
    """The model wants to write prose, and then JSON without end."""
    named = {"type": "function", "function": {"name": "town"}}
    for choice in ("required", named):
        with pytest.raises(openai.BadRequestError, match="a complete output") as caught:
            ask("prose", tool_choice=choice, max_tokens=2)
        needed = int(re.search(r"needs (\d+) tokens", str(caught.value))[1])
        for budget in (needed, needed + 1, needed + 9):
            fields = {"temperature": 1.5, "seed": budget, "max_tokens": budget}
            content, calls, reason = ask("prose", tool_choice=choice, **fields)
            assert content is None and calls and reason == "tool_calls"
            for name, arguments in calls:
                jsonschema.validate(arguments, SCHEMAS[name])


@pytest.mark.full("hermes", "llama3_json", "qwen3_coder", "pythonic")
def test_special_tokens_of_a_notation_are_generated_and_read(ask):
    """Calls are also parsed if the model spells the special tokens."""
    for key in cases_of(ask.form):
        text = scripts(ask.form)[f"{key}-one"].text
        special = [name for name in MARKERS if MARKERS[name] and name in text]
        assert markers_of(ask, f"{key}-one")[:1] == special[:1]
        if special:
            assert markers_of(ask, f"{key}-spelled") == []
