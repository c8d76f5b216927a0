"""Tool calls are the same with and without speculation, and their prompts are the user's.

The scripted model writes calls in the format of the Hermes models. The oracles are the texts of the
scripted model and json.
"""

from __future__ import annotations

import json
from functools import partial

import openai
import pytest
from conformance_util import PERSON, SCRIPTS, TEXTS
from public_issues import issue
from scripted_model import Script, write_scripted_model
from serving_util import run_server

from graft.models import Engine
from graft.models.drafters import NGram

TOOL = {"type": "function", "function": {"name": "person", "parameters": PERSON}}
CALL = json.loads(TEXTS["call"].split("\n")[1])
#: A template that writes everything that it gets about the tools.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
)
PROSE_CALL = (
    'I look it up. <tool_call>\n{"name": "person", "arguments": {"name": '
    '"<function=person> <parameter=name>", "age": 5}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    scripts = {"call": SCRIPTS["call"], "prose-call": Script(PROSE_CALL)}
    added = {"<tool_call>": False, "</tool_call>": False}
    folder = tmp_path_factory.mktemp("tools")
    return write_scripted_model(folder, scripts, added=added, chat_template=TEMPLATE)


@pytest.fixture(scope="module", params=["none", "ngram", "model"])
def client(model, request):
    """Client of a server without drafts, with drafts from the prompt, and with a drafter."""
    drafter = {"none": None, "ngram": partial(NGram, shortest=1), "model": model}[request.param]
    with (
        Engine(model, drafter, max_batch_size=4, max_length=1024, draft_length=7) as engine,
        run_server(engine, tool_call_parser="hermes") as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        yield client


def chat(client, name, tool=TOOL, **fields):
    content = f"{fields.pop('shown', '')}<script:{name}>"
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        tools=[tool],
        temperature=0,
        max_tokens=120,
        **fields,
    )


def call_of(response):
    [choice] = response.choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


@issue(
    "vLLM",
    40875,
    "N-gram drafts with a short minimum match damage half of the tool calls: fragments of the "
    "prompt appear in the call.",
    "The prompt has fragments of other calls; with drafts of every kind the call is the model's.",
)
@issue("vLLM", 35800, "With multi-token prediction, tool calls are malformed.", "As above.")
def test_fragments_of_calls_in_the_prompt(client):
    shown = '<tool_call>\n{"name": "person", "arguments": {"name": "XX", "age": 1} parameter=name '
    for choice in ("auto", "required"):
        assert call_of(chat(client, "call", shown=shown * 3, tool_choice=choice)) == CALL


@issue(
    "vLLM",
    56077,
    "With n-gram drafts, the parser of calls gets several tokens at once and loses arguments or "
    "joins them with keys.",
    "Streamed and complete calls are the same, and no text before the call is lost.",
)
def test_streamed_calls(client):
    complete = chat(client, "prose-call")
    assert call_of(complete) == json.loads(PROSE_CALL.split("\n")[1])
    content, name, arguments = "", "", ""
    for chunk in chat(client, "prose-call", stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert content == complete.choices[0].message.content == "I look it up. "
    assert {"name": name, "arguments": json.loads(arguments)} == call_of(complete)


@issue(
    "vLLM",
    52741,
    "The field `strict` of a function is written into the prompt and changes the model's calls.",
    "The prompt has the same number of tokens without `strict`, and with both of its values.",
)
def test_strict_is_not_part_of_the_prompt(client):
    lengths = set()
    for strict in (None, False, True):
        function = dict(TOOL["function"])
        if strict is not None:
            function["strict"] = strict
        response = chat(client, "call", {"type": "function", "function": function})
        assert call_of(response) == CALL
        lengths.add(response.usage.prompt_tokens)
    assert len(lengths) == 1
    described = TOOL["function"] | {"description": "x" * 40}
    longer = chat(client, "call", {"type": "function", "function": described})
    assert longer.usage.prompt_tokens > lengths.pop()


@issue(
    "llama.cpp",
    27619,
    "The grammar of a tool call fails with an empty stack, depending on nothing but the "
    "description of a parameter.",
    "Descriptions with quotation marks, braces and rules do not change the call.",
)
@issue(
    "llama.cpp",
    12597,
    "The model writes a code fence in place of a call; the empty stack of the grammar ends the "
    "server.",
    'As above, with `tool_choice` "required".',
)
def test_descriptions_do_not_change_the_grammar(client):
    texts = ["plain", '"}]} root ::= "x"', "```json\n{\n", '\\d+ [^"]* <tool_call>', "日本語\u0000"]
    for text in texts:
        name = {"type": "string", "description": text}
        parameters = PERSON | {"properties": PERSON["properties"] | {"name": name}}
        function = {"name": "person", "description": text, "parameters": parameters}
        tool = {"type": "function", "function": function}
        assert call_of(chat(client, "call", tool, tool_choice="required")) == CALL
