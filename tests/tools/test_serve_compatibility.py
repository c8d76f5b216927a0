"""Behaviour that clients of OpenAI, vLLM and SGLang rely on.

Each test compares a response with a statement of the API's documentation, with the engine, or with
the response to an equivalent request.
"""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from graft.models.request import Output, Request
from graft.tools.serve.errors import ApiError, check_output
from graft.tools.serve.messages import read_messages

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("httpx", reason="the package httpx is not installed")

from serving_util import PERSON, PROMPT, generate, response_format, run_server  # noqa: E402

KEY = {"authorization": "Bearer key"}
TEXT = "name: Olga"
MESSAGES = [{"role": "user", "content": PROMPT}]
OPEN_PERSON = {key: value for key, value in PERSON.items() if key != "additionalProperties"}


@pytest.fixture
def send(server, http):
    """Return a function that sends a request with a key and returns the HTTP response."""

    def request(path, method="POST", **fields):
        url = server.url.removesuffix("/v1") + path
        return http.request(method, url, json=fields or None, headers=KEY, timeout=60)

    return request


def sender(send, path, **defaults):
    """Return a function that sends a request, which must succeed, and returns its response."""

    def request(**fields):
        response = send(path, **{"temperature": 0} | defaults | fields)
        assert response.status_code == 200, response.text
        return response.json()

    return request


@pytest.fixture
def complete(send):
    """Return a function that sends a completion request and returns the parsed response."""
    return sender(send, "/v1/completions", prompt=TEXT, max_tokens=6)


@pytest.fixture
def chat(send):
    """Return a function that sends a chat request and returns the parsed response."""
    return sender(send, "/v1/chat/completions", messages=MESSAGES, max_tokens=40)


@pytest.fixture
def events(send):
    """Return a function that sends a streamed request and returns the parsed chunks."""

    def request(path, **fields):
        response = send(path, **{"temperature": 0, "max_tokens": 6, "stream": True} | fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    return request


def text_of(body):
    [choice] = body["choices"]
    return choice["text"]


# Responses ------------------------------------------------------------------------------------


def test_completion_has_documented_fields(complete):
    body = complete(n=2)
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["model"] == "demo" and isinstance(body["created"], int)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def test_chat_completion_has_documented_fields(chat):
    body = chat()
    [choice] = body["choices"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant" and choice["message"]["refusal"] is None
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert "tool_calls" not in choice["message"]


def test_several_prompts_have_choices_in_order(complete):
    body = complete(prompt=[TEXT, "age: 7"], n=2)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [text_of(complete(prompt=prompt)) for prompt in [TEXT] * 2 + ["age: 7"] * 2]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]


def test_chat_log_probabilities_are_sorted_and_have_bytes(chat):
    [choice] = chat(logprobs=True, top_logprobs=3, max_tokens=4)["choices"]
    content = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in content).decode()
        == (choice["message"]["content"])
    )
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0] <= 0  # the request is greedy
        assert sum(map(math.exp, values)) < 1 + 1e-6
    [plain] = chat(logprobs=True, max_tokens=4)["choices"]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]] * len(content)
    assert chat(logprobs=False)["choices"][0]["logprobs"] is None


def test_completion_logprobs_of_zero_report_the_sampled_tokens(complete):
    [choice] = complete(logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {6}
    assert "".join(logprobs["tokens"]) == choice["text"]
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(6)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_echo_returns_the_truncated_prompt(engine, complete, side):
    """The offsets of the log probabilities refer to the returned text."""
    fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1, "echo": True}
    [choice] = complete(**fields, logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] and len(logprobs["tokens"]) == 3
    ids = engine.tokenizer.encode(TEXT)
    kept = engine.tokenizer.decode(ids[:2] if side == "right" else ids[-2:])
    assert choice["text"].startswith(kept) and len(kept) < len(TEXT)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_generation_scores_the_prompt(engine, complete, events, stream):
    """``max_tokens: 0`` with ``echo`` returns the prompt with its log probabilities.

    Evaluation harnesses send such requests.
    """
    fields = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        chunks = events("/v1/completions", **fields, stream_options={"include_usage": True})
        usage = chunks.pop()["usage"]
        choices = [chunk["choices"][0] for chunk in chunks]
        tokens = [token for one in choices for token in one["logprobs"]["tokens"]]
        values = [value for one in choices for value in one["logprobs"]["token_logprobs"]]
    else:
        body = complete(**fields)
        choices = body["choices"]
        usage = body["usage"]
        tokens = choices[0]["logprobs"]["tokens"]
        values = choices[0]["logprobs"]["token_logprobs"]
    num_tokens = len(engine.tokenizer.encode(TEXT))
    assert "".join(choice["text"] for choice in choices) == "".join(tokens) == TEXT
    assert len(values) == num_tokens and values[0] is None and max(values[1:]) <= 0
    assert choices[-1]["finish_reason"] == "length"
    assert usage == usage | {"completion_tokens": 0, "total_tokens": num_tokens}


# Streams --------------------------------------------------------------------------------------


def test_stream_has_role_first_and_finish_reason_last(events, chat):
    chunks = events("/v1/chat/completions", messages=MESSAGES, max_tokens=40)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == chat()["choices"][0]["message"]["content"]


def test_stream_usage_is_null_except_in_the_last_chunk(events, complete):
    chunks = events("/v1/completions", prompt=TEXT, stream_options={"include_usage": True})
    *rest, last = chunks
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in rest)
    assert last["usage"]["total_tokens"] == complete()["usage"]["total_tokens"]
    assert all("usage" not in chunk for chunk in events("/v1/completions", prompt=TEXT))


def test_stream_never_contains_a_stop_string(events):
    chunks = events("/v1/completions", prompt=TEXT, stop=["gaOl"], max_tokens=12)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "Ol"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_streamed_samples_have_their_own_indices(events):
    chunks = events("/v1/completions", prompt=TEXT, n=3, seed=1, temperature=1)
    ends = [one["choices"][0] for one in chunks if one["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2]


# Sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1},
        {"min_p": 0},
        {"best_of": 1},
        {"suffix": None},
        {"logit_bias": {}},
        {"stop": []},
        {"bad_words": []},
        {"detokenize": True},
        {"repetition_penalty": 1},
        {"guided_decoding_backend": "xgrammar"},
        {"stream": None},
        {"user": "u"},
    ],
)
def test_neutral_values_do_not_change_a_completion(complete, fields):
    assert complete(**fields)["choices"] == complete()["choices"]


def test_best_of_may_equal_n(send, complete):
    assert len(complete(n=2, best_of=2)["choices"]) == 2
    response = send("/v1/completions", prompt=TEXT, n=1, best_of=2)
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"


def test_seed_repeats_samples(complete):
    fields = {"seed": 7, "temperature": 1.5, "n": 2, "max_tokens": 12}
    first = [choice["text"] for choice in complete(**fields)["choices"]]
    assert first == [choice["text"] for choice in complete(**fields)["choices"]]
    assert first[0] != first[1]
    assert first != [choice["text"] for choice in complete(**fields | {"seed": 8})["choices"]]


def test_min_tokens_delays_stop_ids(chat):
    usage = chat()["usage"]["completion_tokens"]
    longer = chat(min_tokens=usage + 5)["usage"]["completion_tokens"]
    assert usage < usage + 5 <= longer


def test_max_completion_tokens_replaces_max_tokens(chat):
    body = chat(max_completion_tokens=1, max_tokens=9)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


def test_bad_words_are_never_generated(engine, send, complete):
    assert "Olga" in text_of(complete())
    assert "Olga" not in text_of(complete(bad_words=["Olga"]))
    [token] = engine.tokenizer.encode("Olga", special=False)
    [output] = generate(engine, [Request(tokens=engine.tokenizer.encode(TEXT), max_tokens=6)])
    assert token in output.tokens


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_bad_words_of_several_tokens_are_never_generated(send, complete, temperature):
    """The words are absent from the text, whichever tokens spell them."""
    fields = {"n": 4, "temperature": temperature, "seed": 1, "max_tokens": 40}
    plain = "".join(choice["text"] for choice in complete(**fields)["choices"])
    words = [plain[10:13], plain[20:24].strip(), "Olga N"]
    for choice in complete(**fields, bad_words=words)["choices"]:
        assert not any(word in choice["text"] for word in words)
    for fields, message in (
        ({"bad_words": ["x y z"], "regex": "a"}, "cannot be combined with a grammar"),
        ({"bad_words": [" "]}, "must not contain an empty word"),
    ):
        response = send("/v1/completions", prompt=TEXT, **fields)
        assert response.status_code == 400 and message in response.text


def test_prompts_are_truncated_on_either_side(engine, complete):
    ids = engine.tokenizer.encode(TEXT, special=False) * 40

    def kept(**fields):
        body = complete(prompt=ids, return_token_ids=True, max_tokens=3, **fields)
        return body["choices"][0]["prompt_token_ids"]

    assert kept(truncate_prompt_tokens=4) == ids[-4:]
    assert kept(truncate_prompt_tokens=4, truncation_side="left") == ids[-4:]
    assert kept(truncate_prompt_tokens=4, truncation_side="right") == ids[:4]
    max_length = engine.options.sizes[0]
    long = ids * (max_length // len(ids) + 1)
    body = complete(prompt=long, return_token_ids=True, max_tokens=3, truncate_prompt_tokens=-1)
    assert body["choices"][0]["prompt_token_ids"] == long[-(max_length - 3) :]


def test_error_for_long_prompt_names_the_context_length(engine, send):
    max_length = engine.options.sizes[0]
    response = send("/v1/completions", prompt=[5] * max_length)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    message = response.json()["error"]["message"]
    assert f"the prompt has {max_length} tokens and is longer than the model's context" in message
    assert f"the model's maximum context length is {max_length} tokens" in message


def test_optional_fields_of_responses_are_null(complete, chat):
    body = complete()
    assert body["system_fingerprint"] is None
    assert body["choices"][0]["token_ids"] is None
    assert body["choices"][0]["prompt_token_ids"] is None
    body = chat()
    assert body["prompt_token_ids"] is None and body["service_tier"] is None
    assert body["choices"][0]["token_ids"] is None


def test_request_id_header_is_part_of_the_id(server, http):
    url = server.url + "/completions"
    headers = KEY | {"x-request-id": "mine"}
    for fields, name in (({}, "mine"), ({"request_id": "other"}, "other")):
        body = http.post(url, json={"prompt": TEXT, "max_tokens": 1} | fields, headers=headers)
        assert body.json()["id"] == f"cmpl-{name}"


def test_documents_are_available_to_the_chat_template(engine, http):
    template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    with run_server(engine, chat_template=template) as server:
        fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        fields |= {"documents": [{"title": "t", "text": "name: Olga"}], "return_token_ids": True}
        body = http.post(server.url + "/chat/completions", json=fields).json()
        assert engine.tokenizer.decode(body["prompt_token_ids"]) == "name: Olgax"
        response = http.post(server.url + "/chat/completions", json=fields | {"documents": "x"})
        assert response.status_code == 400 and "documents must be a list" in response.text


def test_endpoints_of_sglang_have_the_same_responses(send):
    for path in ("/tokenize", "/detokenize"):
        fields = {"prompt": TEXT} if path == "/tokenize" else {"tokens": [5, 6]}
        assert send(path, **fields).json() == send(f"/v1{path}", **fields).json()
    for method in ("GET", "POST"):
        assert send("/ping", method).json() == send("/health", "GET").json()
    assert send("/health_generate", "GET").status_code == 200
    assert send("/get_model_info", "GET").json()["model_path"] == "demo"


def test_logit_bias_and_allowed_ids_select_tokens(engine, complete):
    [token] = engine.tokenizer.encode("a", special=False)
    assert text_of(complete(logit_bias={str(token): 100})) == "a" * 6
    assert text_of(complete(allowed_token_ids=[token])) == "a" * 6


# Structured outputs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": response_format(PERSON)},
        {"response_format": {"type": "json_schema", "schema": PERSON}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"json_schema": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": PERSON, "regex": None, "disable_fallback": False}},
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": OPEN_PERSON, "disable_additional_properties": True}},
    ],
)
def test_all_spellings_of_a_schema_are_enforced(chat, fields):
    content = chat(**fields, max_tokens=80)["choices"][0]["message"]["content"]
    assert {*json.loads(content)} == {"name", "age"} and "\n" not in content


def test_open_schema_allows_other_properties_unless_they_are_disabled(chat, send):
    """The schema requires a property that it does not list."""
    schema = {"type": "object", "properties": {"z": {"type": "null"}}, "required": ["name"]}
    structured = {"json": schema, "disable_additional_properties": False}
    content = chat(structured_outputs=structured, max_tokens=120)["choices"][0]["message"]
    assert "name" in json.loads(content["content"])
    structured["disable_additional_properties"] = True
    form = response_format(schema)
    form["json_schema"]["strict"] = True
    for fields in ({"structured_outputs": structured}, {"response_format": form}):
        response = send("/v1/chat/completions", messages=MESSAGES, **fields)
        assert response.status_code == 400 and "allows no output" in response.text
    form["json_schema"]["strict"] = False
    content = chat(response_format=form, max_tokens=120)["choices"][0]["message"]
    assert "name" in json.loads(content["content"])
    form["json_schema"]["strict"] = 1
    response = send("/v1/chat/completions", messages=MESSAGES, response_format=form)
    assert response.status_code == 400 and "strict must be true or false, got 1" in response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "yes|no"},
        {"regex": "yes|no"},
        pytest.param({"guided_grammar": 'root ::= "yes" | "no"'}, marks=pytest.mark.full),
        pytest.param({"ebnf": 'root ::= "yes" | "no"'}, marks=pytest.mark.full),
        pytest.param(
            {"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, marks=pytest.mark.full
        ),
    ],
)
def test_all_spellings_of_a_choice_are_enforced(chat, fields):
    assert chat(**fields)["choices"][0]["message"]["content"] in ("yes", "no")


def test_json_object_format_generates_an_object(chat):
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        content = chat(**fields, max_tokens=120)["choices"][0]["message"]["content"]
        assert isinstance(json.loads(content), dict)


# Messages -------------------------------------------------------------------------------------


def test_text_parts_and_names_of_messages_are_accepted(chat):
    parts = [{"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": parts}]
    assert chat(messages=messages)["choices"] == chat()["choices"]
    chat(messages=[{"role": "developer", "content": "Be terse."}, *MESSAGES])
    chat(messages=[{"role": "user", "content": PROMPT, "name": "joe"}])


@pytest.mark.parametrize("calls", [None, []])
def test_null_and_empty_fields_of_messages_are_not_passed_to_the_template(engine, http, calls):
    """The client's ``message.model_dump()`` has these fields, and templates test for them."""
    template = "{% for m in messages %}{{ m | list | join(' ') }}: {{ m.content }};{% endfor %}"
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": calls}
    messages = [{"role": "user", "content": None}, answer | {"function_call": None}]
    with run_server(engine, chat_template=template) as server:
        body = http.post(server.url + "/tokenize", json={"messages": messages}).json()
    assert engine.tokenizer.decode(body["tokens"]) == "role content: ;role content: x;"


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_arguments_of_a_call_in_history_are_json_text_or_an_object(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = read_messages([{"role": "assistant", "tool_calls": [call]}])
    [read] = message["tool_calls"]
    assert read["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize("arguments", ["", "null", None])
def test_missing_arguments_of_a_call_in_history_are_an_empty_object(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("content", [{}, 0, False, 5, [1]])
def test_content_that_is_no_text_is_rejected(content):
    with pytest.raises(ApiError, match="content must be text, got"):
        read_messages([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "user, assistant, tool, function, got 'robot'"),
        ({"role": "", "content": "x"}, "got ''"),
        ({"role": "user", "content": "x", "colour": "red"}, "has the key 'colour'"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name must be a string, got 1"),
        (
            {"role": "tool", "content": "x", "tool_call_id": []},
            "messages[0].tool_call_id must be a string, got []",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "has the key 'function_call'"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "tool_calls must be a list"),
        (
            {"role": "assistant", "tool_calls": [1]},
            "messages[0].tool_calls[0] must be an object, got 1",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "kind": 1}]},
            "messages[0].tool_calls[0] has the key 'kind'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "code": "x"}}]},
            "tool_calls[0].function has the key 'code'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of the tool call 'f' are not JSON",
        ),
    ],
)
def test_messages_with_unknown_roles_and_keys_are_refused(message, words):
    with pytest.raises(ApiError, match=re.escape(words)) as caught:
        read_messages([message])
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "", "content": "x"}, "messages[0].role must be a non-empty string"),
        ({"role": "user", "content": "x", "": 1}, "has the key ''"),
    ],
)
def test_empty_roles_and_keys_are_refused(message, words):
    """An empty text occurs in every template, but is neither a role nor a key."""
    with pytest.raises(ApiError, match=re.escape(words)):
        read_messages([message], "{{ '' }}{% for m in messages %}{{ m.role }}{% endfor %}")


def test_messages_can_have_roles_and_keys_of_the_template():
    message = {"role": "developer", "content": "x", "plan": "y", "unused": None}
    template = "{% if m.role == 'developer' %}{{ m.plan }}{% endif %}"
    read = {"role": "developer", "content": "x", "plan": "y"}
    assert read_messages([message], template) == [read]
    assert read_messages([{"role": "developer", "content": "x"}], "{{ m.role }}") == [
        {"role": "system", "content": "x"}
    ]


def test_refusal_is_a_part_of_the_content():
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "thing"}]
    [message] = read_messages([{"role": "assistant", "content": parts}])
    assert message["content"] == "nothing"


def test_template_gets_only_the_fields_of_a_message_that_have_a_meaning():
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": "function", "index": 0, "function": function}
    message = {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "annotations": [],
        "parsed": {"x": 1},
        "audio": None,
        "reasoning": "hm",
        "tool_calls": [call],
    }
    assert read_messages([message]) == [
        {
            "role": "assistant",
            "content": "no",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
            ],
        }
    ]


# Errors and other endpoints -------------------------------------------------------------------


_STOP_RULE = "stop must be a non-empty string or a list of non-empty strings, got "


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"max_tokens": -1}, "max_tokens must be an integer from 1 to "),
        ("chat/completions", {"max_tokens": 0}, "max_tokens must be an integer from 1 to "),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens must be an inte"),
        ("responses", {"max_output_tokens": -1}, "max_output_tokens must be an integer from 1 to "),
        ("completions", {"max_tokens": -1}, "max_tokens must be an integer from 0 to "),
        ("completions", {"max_tokens": 0}, "max_tokens 0 requires echo: true"),
        ("completions", {"stop": ""}, _STOP_RULE + "''"),
        ("chat/completions", {"stop": [5]}, _STOP_RULE + "[5]"),
        ("responses", {"stop": 5}, _STOP_RULE + "5"),
    ],
)
def test_error_says_which_values_are_allowed(send, path, fields, message):
    prompts = {"responses": {"input": TEXT}, "completions": {"prompt": TEXT}}
    prompt = prompts.get(path, {"messages": MESSAGES})
    response = send(f"/v1/{path}", **prompt | fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"stop": ""}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"suffix": "x"}, "suffix"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"bad_words": ["x" * 8193] * 2}, "bad_words"),
        ({"stop_token_ids": 2}, "stop_token_ids"),
        ({"stop_token_ids": 2, "ignore_eos": True}, "stop_token_ids"),
        ({"stop_token_ids": "a", "ignore_eos": True}, "stop_token_ids"),
        ({"prompt": [5, "a"], "echo": True}, "prompt"),
        ({"prompt": [5, None], "echo": True}, "prompt"),
        ({"prompt": [5, [6]], "echo": True}, "prompt"),
        ({"prompt": [5, True], "echo": True}, "prompt"),
        ({"prompt": [[5], ["a"]], "echo": True}, "prompt"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": -5}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"detokenize": False}, "detokenize"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": PERSON, "disable_fallback": 1}}, "structured_outputs"),
    ],
)
def test_invalid_value_is_reported_with_its_field(send, fields, param):
    response = send("/v1/completions", **{"prompt": TEXT} | fields)
    error = response.json()["error"]
    assert response.status_code == 400
    assert {*error} == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    assert error["message"]


@pytest.mark.parametrize(
    ("reason", "error_type", "status", "kind"),
    [
        ("error", "MatcherError", 400, "invalid_request_error"),
        ("error", "GraftError", 500, "server_error"),
        ("error", "EngineError", 503, "server_error"),
        ("refused", "GrammarError", 400, "invalid_request_error"),
        ("refused", "GrammarUnavailableError", 503, "server_error"),
        ("refused", "QueueFullError", 429, "rate_limit_error"),
        ("dead_end", None, 400, "invalid_request_error"),
        ("cancelled", None, 503, "server_error"),
    ],
)
def test_status_of_failed_output_depends_on_its_cause(reason, error_type, status, kind):
    """A grammar that is too slow is an error of the request, not of the server."""
    with pytest.raises(ApiError, match="why") as caught:
        check_output(Output("x", reason=reason, error="why", error_type=error_type))
    assert (caught.value.status, caught.value.type) == (status, kind)


def test_lone_surrogates_in_names_and_values_are_reported(server, http):
    for fields, param in (
        ({"\ud800": 1}, "\ud800"),
        ({"truncation_side": "\ud800"}, "truncation_side"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"stream_options": {"\ud800": 1}}, "stream_options"),
    ):
        body = json.dumps({"prompt": TEXT, "stream": True, **fields})
        headers = KEY | {"content-type": "application/json"}
        response = http.post(f"{server.url}/completions", content=body, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "\\ud800" in error["message"]


@pytest.mark.parametrize(
    ("choice", "function", "output", "param"),
    [
        ("required", {"parameters": {"type": "object", "required": 5}}, {}, "tools"),
        ("required", {"parameters": {"\ud800": 1}}, {}, "tools"),
        ("auto", {"parameters": {"\ud800": 1}}, {}, "tools"),
        ("required", {}, {"type": "object", "required": 5}, "response_format"),
        ("auto", {}, {"type": "object", "required": 5}, "response_format"),
        ("auto", {}, {"\ud800": 1}, "response_format"),
        ("auto", {}, 5, "response_format"),
    ],
)
def test_error_of_tools_or_response_format_names_the_field(
    server, http, choice, function, output, param
):
    """With required calls, response_format has no effect, but is checked."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", **function}}],
        "tool_choice": choice,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": output}},
    }
    headers = KEY | {"content-type": "application/json"}
    response = http.post(
        f"{server.url}/chat/completions", content=json.dumps(body), headers=headers
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_wrong_method_and_path_have_error_bodies(send):
    response = send("/v1/completions", "GET")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "/v1/completions requires POST, got GET"
    response = send("/v1/embeddings", input="x")
    message = response.json()["error"]["message"]
    assert response.status_code == 404 and "no endpoint '/v1/embeddings'" in message
    assert "/v1/chat/completions, /v1/completions, /v1/responses" in message
    response = send("/chat/completions", messages=[])  # the client's base URL lacks /v1
    message = response.json()["error"]["message"]
    assert response.status_code == 404 and "the base URL must end with /v1" in message
    response = send("/v1/completions", prompt=TEXT, model="other")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    assert send("/health", "HEAD").status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer key", 200),
        ("bearer  key", 200),
        ("BEARER other key", 200),
        ("Basic key", 401),
        ("key", 401),
        ("Bearer", 401),
        ("Bearer key2", 401),
        (None, 401),
    ],
)
def test_api_key_is_a_bearer_token(server, http, header, status):
    """The name of the scheme is case-insensitive, and a refusal names the scheme."""
    headers = {} if header is None else {"authorization": header}
    response = http.get(f"{server.url}/models", headers=headers)
    assert response.status_code == status
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
def test_disconnect_within_the_body_is_no_error(server, path):
    async def receive():
        return {"type": "http.disconnect"}

    async def send(_message):
        pass

    headers = [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(server.service.app(scope | {"query_string": b""}, receive, send))
    assert server.service.api_requests == 0


def test_models_endpoint_lists_the_model(send):
    assert send("/v1/models/", "GET").json() == send("/v1/models", "GET").json()
    body = send("/v1/models", "GET").json()
    assert body["object"] == "list" and [model["id"] for model in body["data"]] == ["demo"]
    assert body["data"][0] == send("/v1/models/demo", "GET").json()
    assert send("/v1/models/other", "GET").status_code == 404


def test_detokenize_inverts_tokenize(send, engine):
    body = send("/tokenize", prompt="héllo {x}").json()
    assert body["count"] == len(body["tokens"]) and body["max_model_len"] == 512
    assert send("/detokenize", tokens=body["tokens"]).json() == {"prompt": "héllo {x}"}
    error = send("/detokenize", tokens=[99_999])
    assert error.status_code == 400 and error.json()["error"]["param"] == "tokens"
    messages = send("/tokenize", messages=MESSAGES).json()["tokens"]
    assert messages == engine.tokenizer.chat(MESSAGES)
