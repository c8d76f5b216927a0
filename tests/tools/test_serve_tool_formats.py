"""Tests of tool calls in each notation. A scripted model writes and OpenAI's client reads them."""

from __future__ import annotations

import json

import jsonschema
import pytest
from scripted_model import Script, write_scripted_model

from graft.models.engine.engine import Engine
from graft.tools.serve.tool_formats import TOOL_FORMATS

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")

from serving_util import chat, run_server  # noqa: E402

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
#: By notation: the text of a call, of two calls, and of a required call.
CASES = {
    "hermes": (_TAGGED[0], "\n".join(_TAGGED), _FIRST_OBJECT),
    "llama3_json": (_LLAMA[0], "; ".join(_LLAMA), _LLAMA[0]),
    "llama3_json/tag": (f"<|python_tag|>{_LLAMA[0]}", f"<|python_tag|>{'; '.join(_LLAMA)}", None),
    "llama3_json/function": (
        f"<function=town>{_FIRST_JSON}</function>",
        f"<function=town>{_FIRST_JSON}</function><function=now>{_SECOND_JSON}</function>",
        None,
    ),
    "mistral": (
        f"[TOOL_CALLS]town{_FIRST_JSON}",
        f"[TOOL_CALLS]town{_FIRST_JSON}[TOOL_CALLS]now{_SECOND_JSON}",
        f"[TOOL_CALLS]town{_FIRST_JSON}",
    ),
    "mistral/args": (
        f"[TOOL_CALLS]town[ARGS]{_FIRST_JSON}",
        f"[TOOL_CALLS]town[ARGS]{_FIRST_JSON}[TOOL_CALLS]now[ARGS]{_SECOND_JSON}",
        f"[TOOL_CALLS]town[ARGS]{_FIRST_JSON}",
    ),
    "mistral/array": (
        f"[TOOL_CALLS][{_FIRST_OBJECT}]",
        f"[TOOL_CALLS] [{_FIRST_OBJECT}, {_SECOND_OBJECT}]",
        f"[TOOL_CALLS][{_FIRST_OBJECT}]",
    ),
    "qwen3_coder": (_XML[0], "\n".join(_XML), _XML[0]),
    "pythonic": (f"[{_PYTHON[0]}]", f"[{', '.join(_PYTHON)}]", f"[{_PYTHON[0]}]"),
}
#: Text before the calls.
BEFORE = "Well, 京:\n"
MARKERS = {"<tool_call>": False, "</tool_call>": False}
MARKERS |= {"[TOOL_CALLS]": True, "[ARGS]": True, "<|python_tag|>": True}
#: A call that no notation allows: the function is unknown, and then the arguments are wrong.
UNKNOWN = '<tool_call>\n{"name": "town2", "arguments": {"city": 1}}\n</tool_call>'


def scripts():
    found = {"unknown": Script(UNKNOWN), "prose": Script("No call here, 京. [1] {2}")}
    for name, (one, two, required) in CASES.items():
        key = name.replace("/", "-")
        found[f"{key}-one"] = Script(one)
        found[f"{key}-two"] = Script(two if name == "pythonic" else BEFORE + two)
        if required not in (None, one):
            found[f"{key}-required"] = Script(required)
        if any(marker in one for marker in MARKERS):
            found[f"{key}-spelled"] = Script(one, spelled=True)
    found["hermes-array"] = Script(f"[{_FIRST_OBJECT}]")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("tools"), scripts(), added=MARKERS)


@pytest.fixture(
    scope="module", params=["drafts", pytest.param("no drafts", marks=pytest.mark.full)]
)
def engine(request, folder):
    """Return an engine. If it has drafts, the model is its own drafter."""
    drafter = folder if request.param == "drafts" else None
    with Engine(folder, drafter, max_batch_size=8, max_length=512) as engine:
        yield engine
        assert bool(sum(engine.stats.accepted)) == (drafter is not None)


@pytest.fixture(scope="module", params=sorted(TOOL_FORMATS))
def ask(request, engine):
    """Return a function that returns content, calls and finish reason of a response."""
    with (
        run_server(engine, tool_call_parser=request.param) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):

        def ask(script, **fields):
            messages = [{"role": "user", "content": f"Write <script:{script}>"}]
            fields = {"tools": TOOLS, "max_tokens": 300, **fields}
            raw = fields.pop("raw", False)
            response = chat(client, messages=messages, **fields)
            if raw:
                return response
            return read_stream(response) if fields.get("stream") else read_response(response)

        ask.form = request.param
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


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.full("llama3_json", "qwen3_coder")
def test_model_can_write_calls(ask, stream):
    for key in cases_of(ask.form):
        before = None if key == "pythonic" else BEFORE
        assert ask(f"{key}-one", stream=stream) == (None, [FIRST], "tool_calls")
        found = ask(f"{key}-two", stream=stream)
        assert found == (before, [FIRST, SECOND], "tool_calls")
        found = ask(f"{key}-two", stream=stream, parallel_tool_calls=False)
        assert found == (before, [FIRST], "tool_calls")
        if f"{key}-spelled" in scripts():
            assert ask(f"{key}-spelled", stream=stream) == (None, [FIRST], "tool_calls")
    text = scripts()["prose"].text
    assert ask("prose", stream=stream) == (text, [], "stop")


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.full("hermes", "pythonic")
def test_required_calls_are_written_in_the_notation_of_the_model(ask, stream):
    named = {"type": "function", "function": {"name": "town"}}
    for key in cases_of(ask.form):
        required = CASES[key.replace("-", "/")][2]
        if required is None:
            continue
        script = f"{key}-required" if f"{key}-required" in scripts() else f"{key}-one"
        expected = (None, [FIRST], "tool_calls")
        several = "hermes-array" if key == "hermes" else script
        assert ask(several, stream=stream, tool_choice="required") == expected
        assert ask(script, stream=stream, tool_choice=named) == expected
        found = ask(script, stream=stream, tool_choice="required", parallel_tool_calls=False)
        assert found == expected


@pytest.mark.full("hermes", "mistral", "pythonic")
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


@pytest.mark.full("qwen3_coder")
def test_special_tokens_of_a_notation_are_generated_and_read(ask):
    """Calls are also parsed if the model spells the special tokens."""
    for key in cases_of(ask.form):
        text = scripts()[f"{key}-one"].text
        special = [name for name in MARKERS if MARKERS[name] and name in text]
        assert markers_of(ask, f"{key}-one")[:1] == special[:1]
        if special:
            assert markers_of(ask, f"{key}-spelled") == []
