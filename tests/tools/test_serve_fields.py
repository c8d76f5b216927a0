"""Tests of fields and endpoints that the server has in common with vLLM and SGLang."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection

import pytest

from graft.models.request import Request
from graft.native.children.errors import ChildUnavailable
from graft.tools.version import version

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("httpx", reason="the package httpx is not installed")

from serving_util import PERSON, PROMPT, chat, generate, response_format, run_server  # noqa: E402

KEY = {"authorization": "Bearer key"}


@pytest.fixture
def post(server, http):
    """Return a function that sends a request with a key and returns status and parsed body."""

    def send(path, **fields):
        response = http.post(
            server.url.removesuffix("/v1") + path, json=fields, headers=KEY, timeout=60
        )
        return response.status_code, response.json()

    return send


@pytest.fixture
def complete(post):
    """Return a function that sends a completion request and returns its first choice."""

    def send(**fields):
        defaults = {"prompt": "name: Olga", "temperature": 0, "max_tokens": 8}
        status, body = post("/v1/completions", **defaults | fields)
        assert status == 200, body
        return body["choices"][0]

    return send


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_special_tokens": True},
        {"spaces_between_special_tokens": False},
        {"ignore_eos": False},
        {"add_generation_prompt": True},
        {"continue_final_message": False},
        {"use_beam_search": False},
        {"reasoning_effort": "low"},
        {"echo": False},
        {"store": True},
        {"length_penalty": 1},
        {"include_stop_str_in_output": False},
        {"separate_reasoning": True},
        {"truncate_prompt_tokens": 1000},
        {"request_id": "x"},
        {"tool_choice": "none"},
        {"stream_options": None},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_neutral_fields_do_not_change_the_output(post, fields):
    messages = [{"role": "user", "content": PROMPT}]
    request = {"messages": messages, "temperature": 0, "max_tokens": 20}
    status, body = post("/v1/chat/completions", **request | fields)
    assert status == 200, body
    plain = post("/v1/chat/completions", **request)[1]
    assert body["choices"] == plain["choices"]


def test_ignore_eos_generates_up_to_max_tokens(client, complete):
    """Stop ids of the request, and the end of a grammar, still end the output."""
    assert chat(client).choices[0].finish_reason == "stop"
    choice = chat(client, ignore_eos=True, max_tokens=30).choices[0]
    assert choice.finish_reason == "length"
    choice = chat(client, ignore_eos=True, response_format=response_format(PERSON)).choices[0]
    assert choice.finish_reason == "stop"
    assert {*json.loads(choice.message.content)} == {"name", "age"}
    choice = complete(ignore_eos=True)
    assert choice["finish_reason"] == "length"
    choice = chat(
        client, ignore_eos=True, response_format=response_format(PERSON), stop=["Novak"]
    ).choices[0]
    assert choice.message.content == '{"name": "Olga '


def test_min_tokens_delays_stop_strings(client):
    text = chat(client, response_format=response_format(PERSON)).choices[0].message.content
    for min_tokens, expected in ((1, '{"name": "Olga '), (20, text)):
        response = chat(
            client, response_format=response_format(PERSON), stop=["Novak"], min_tokens=min_tokens
        )
        assert response.choices[0].message.content == expected


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_part_of_the_text_on_request(engine, client, stream):
    """The request allows the ids of two special tokens and no others."""
    tokenizer = engine.tokenizer
    allowed = [tokenizer.backend.token_to_id(name) for name in tokenizer.special_names[:2]]
    fields = {"model": "demo", "prompt": "x", "max_tokens": 12, "stream": stream, "seed": 1}
    extra = {"allowed_token_ids": allowed, "return_token_ids": True}
    for skip in (True, False):
        response = client.completions.create(
            **fields, extra_body=extra | {"skip_special_tokens": skip}
        )
        choices = [chunk.choices[0] for chunk in response] if stream else response.choices
        ids = [token for choice in choices for token in choice.token_ids]
        expected = "" if skip else "".join(map(tokenizer.backend.id_to_token, ids))
        assert len(ids) == 12 and "".join(choice.text for choice in choices) == expected


def test_stop_reason_is_the_stop_string_or_the_requested_stop_id(engine, client, complete):
    """For a stop id of the model, ``stop_reason`` is null and ``matched_stop`` is the id."""
    choice = complete(stop=["gaOlg", "x", "gaO"])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Ol", "stop", "gaO")
    token = engine.tokenizer.encode("Olga")[-1]
    choice = complete(stop_token_ids=[token])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    choice = complete()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    choice = chat(client).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.matched_stop in engine.tokenizer.stop_ids


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_output_with_grammar(client, stream):
    response = chat(client, response_format=response_format(PERSON), stop=[" Novak"], stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in response]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        choices = response.choices
        text = choices[0].message.content
    assert text == '{"name": "Olga'
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", " Novak")


def test_echo_returns_prompt_text_and_its_log_probabilities(engine, complete):
    """A token of the prompt has the same log probability as if the model had generated it."""
    ids = engine.tokenizer.encode("name: Olga")
    [output] = generate(engine, [Request(tokens=ids, max_tokens=8, logprobs=2)])
    prompt = ids + output.tokens
    choice = complete(prompt=prompt, echo=True, logprobs=2)
    assert choice["text"].startswith(engine.tokenizer.decode(prompt))
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    generated = logprobs["token_logprobs"][len(ids) : len(prompt)]
    assert generated == [logprob.value for logprob in output.logprobs]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert complete(echo=True)["text"] == "name: Olga" + complete()["text"]
    entries = complete(prompt=prompt, prompt_logprobs=1)["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(prompt)
    for entry, token, logprob in zip(
        entries[len(ids) :], output.tokens, output.logprobs, strict=True
    ):
        assert entry[str(token)]["logprob"] == logprob.value


def test_prompt_logprobs_have_ranks_among_all_ids(engine, complete):
    """The rank of a token does not depend on the number of ids that are reported."""
    ids = engine.tokenizer.encode("name: Olga")
    prompt = ids + generate(engine, [Request(tokens=ids, max_tokens=8)])[0].tokens
    alone = complete(prompt=prompt, prompt_logprobs=0)["prompt_logprobs"][1:]
    entries = complete(prompt=prompt, prompt_logprobs=20)["prompt_logprobs"][1:]
    found = []
    for token, only, entry in zip(map(str, prompt[1:]), alone, entries, strict=True):
        values = sorted((one["logprob"] for one in entry.values()), reverse=True)
        rank = entry[token]["rank"]
        assert only == {token: entry[token]}
        assert sorted(one["rank"] for one in entry.values())[:20] == list(range(1, 21))
        if rank <= 20:
            assert values.index(entry[token]["logprob"]) == rank - 1
        found.append(rank)
    assert found[len(ids) - 1 :] == [1] * 8 and max(found) > 20


def test_streamed_echo_equals_response_that_is_not_streamed(client):
    fields = {
        "model": "demo",
        "prompt": "name: Olga",
        "max_tokens": 8,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
        "n": 2,
    }
    expected = client.completions.create(**fields)
    texts = ["", ""]
    tokens = [[], []]
    for chunk in client.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
    assert texts == [choice.text for choice in expected.choices]
    assert tokens == [choice.logprobs.tokens for choice in expected.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompt_and_output_are_returned(engine, client, stream):
    prompt = engine.tokenizer.encode("name: Olga")
    [output] = generate(engine, [Request(tokens=prompt, max_tokens=8)])
    fields = {"model": "demo", "max_tokens": 8, "temperature": 0, "stream": stream}
    extra = {"return_token_ids": True}
    response = client.completions.create(prompt=prompt, **fields, extra_body=extra)
    choices = [chunk.choices[0] for chunk in response] if stream else response.choices
    assert [token for choice in choices for token in choice.token_ids] == output.tokens
    assert choices[0].prompt_token_ids == prompt
    assert all("prompt_token_ids" not in choice.model_dump() for choice in choices[1:])
    messages = [{"role": "user", "content": PROMPT}]
    tools = [{"type": "function", "function": {"name": "person", "parameters": PERSON}}]
    fields |= {"tools": tools, "tool_choice": "required", "max_tokens": 60}
    response = client.chat.completions.create(messages=messages, **fields, extra_body=extra)
    chunks = list(response) if stream else [response]
    assert PROMPT in engine.tokenizer.decode(chunks[0].prompt_token_ids)
    assert "prompt_token_ids" not in chunks[-1].model_dump() or not stream
    tokens = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
    assert engine.tokenizer.decode(tokens).startswith('<tool_call>\n{"name": "person"')
    assert tokens[-1] in engine.tokenizer.stop_ids


def test_log_probabilities_name_tokens_by_id_on_request(post, complete):
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = complete(logprobs=1, **fields)
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    messages = [{"role": "user", "content": "hi"}]
    fields |= {"messages": messages, "logprobs": True, "max_tokens": 1, "temperature": 0}
    [choice] = post("/invocations", **fields)[1]["choices"]
    [entry] = choice["logprobs"]["content"]
    assert entry["token"] == f"token_id:{choice['token_ids'][0]}"


def test_stop_string_is_included_on_request(complete):
    choice = complete(stop=["gaO"], include_stop_str_in_output=True)
    assert (choice["text"], choice["stop_reason"]) == ("OlgaO", "gaO")


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(complete):
    whole = complete(prompt=[9, 8, 7, 6, 5], truncate_prompt_tokens=3)
    assert whole["text"] == complete(prompt=[7, 6, 5])["text"]


def test_completion_top_logprobs_contain_the_sampled_token(complete):
    """If ``logprobs`` is N, each position has up to N + 1 tokens, as in OpenAI's API."""
    for count in (0, 2):
        choice = complete(logprobs=count, logit_bias={"5": 100})
        logprobs = choice["logprobs"]
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert token in top
            assert max(1, count) <= len(top) <= count + 1


def test_continue_final_message_extends_the_last_message(engine, post):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Sure, <|end|>"},
    ]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = post("/tokenize", **fields)[1]["tokens"]
    text = engine.tokenizer.decode(tokens, special=True)
    assert text.endswith("Sure, <|end|>")
    stop_ids = set(engine.tokenizer.stop_ids)
    assert not stop_ids.intersection(tokens[-4:])
    request = fields | {"temperature": 0, "max_tokens": 5}
    plain = post("/v1/chat/completions", **request)[1]["choices"][0]["message"]
    echo = post("/v1/chat/completions", **request, echo=True)[1]["choices"][0]["message"]
    assert echo["content"] == "Sure, <|end|>" + plain["content"]
    status, body = post("/v1/chat/completions", **request | {"add_generation_prompt": True})
    assert status == 400
    assert body["error"]["param"] == "continue_final_message"


def test_chat_accepts_tool_call_without_arguments_in_history(post):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    assert post("/v1/chat/completions", messages=messages, max_tokens=3)[0] == 200


def test_required_call_that_is_cut_is_not_returned_as_content(client):
    tools = [{"type": "function", "function": {"name": "person", "parameters": PERSON}}]
    fields = {"tools": tools, "tool_choice": "required", "closing": "off"}
    for max_tokens in (1, 12):
        [choice] = chat(client, max_tokens=max_tokens, **fields).choices
        assert choice.finish_reason == "length"
        assert choice.message.content == "" and not choice.message.tool_calls


def test_stream_reports_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(client, stream=True, stream_options=options, max_tokens=10)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == last.usage.completion_tokens
    assert last.choices == []
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, stream_options=options, max_tokens=10))
    assert all(chunk.usage is None for chunk in chunks)


def test_tokenize_and_detokenize_endpoints(engine, post):
    tokenizer = engine.tokenizer
    text = "name: Olga"
    for special in (False, True):
        status, body = post("/tokenize", prompt=text, model="demo", add_special_tokens=special)
        expected = tokenizer.encode(text, special=special)
        assert status == 200
        assert body == {
            "count": len(expected),
            "max_model_len": 512,
            "tokens": expected,
            "token_strs": None,
        }
    names = post("/tokenize", prompt=text, return_token_strs=True)[1]["token_strs"]
    assert names == [tokenizer.backend.id_to_token(token) for token in expected]
    assert post("/detokenize", tokens=expected) == (200, {"prompt": text})
    messages = [{"role": "user", "content": text}]
    assert post("/tokenize", messages=messages)[1]["tokens"] == tokenizer.chat(messages)
    for path, fields in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
    ):
        assert post(path, **fields)[0] == 400


def test_version_and_model_endpoints(server, client, http):
    root = server.url.removesuffix("/v1")
    assert http.get(f"{root}/version").json() == {"version": version()}
    assert http.get(f"{root}/load").json() == {"server_load": 0}
    assert http.get(f"{root}/ping").status_code == 200
    model = client.models.retrieve("demo")
    assert (model.root, model.max_model_len) == ("demo", 512)
    assert model.created > 0


def test_server_uses_given_chat_template(engine, http):
    with run_server(engine, chat_template="{{ messages[0].content }}!") as server:
        root = server.url.removesuffix("/v1")
        messages = [{"role": "user", "content": "hi"}]
        body = http.post(f"{root}/tokenize", json={"messages": messages}).json()
    assert engine.tokenizer.decode(body["tokens"]) == "hi!"


def test_access_log_has_one_line_per_request(engine, http, capsys):
    with run_server(engine, access_log=True) as server:
        http.get(f"{server.url.removesuffix('/v1')}/health")
    assert '"GET /health HTTP/1.1" 200' in capsys.readouterr().out


def test_server_requires_json_and_allowed_host(engine, http):
    """Without these checks, web pages could send requests to a server without authentication."""
    with run_server(engine, hosts=frozenset({"127.0.0.1"})) as server:
        body = json.dumps({"prompt": "a"})
        url = f"{server.url}/completions"
        for headers, status in (
            ({"content-type": "text/plain"}, 415),
            ({}, 415),
            ({"content-type": "application/json; charset=utf-8"}, 200),
            ({"content-type": "application/json", "host": "example.org:80"}, 403),
        ):
            response = http.post(url, content=body, headers=headers, timeout=60)
            assert response.status_code == status
        assert http.get(f"{server.url}/models", headers={"host": "[::1]:8000"}).status_code == 403


def test_error_for_large_body_can_be_read(server, capfd):
    """The client sends the whole body before it reads the response."""
    body = json.dumps({"prompt": "a" * (20 << 20)})
    headers = KEY | {"content-type": "application/json", "connection": "close"}
    for _ in range(3):
        connection = HTTPConnection(server.url.split("/")[2], timeout=60)
        with closing(connection):
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            assert response.status == 413
            assert "longer than 20000 bytes" in json.load(response)["error"]["message"]
    assert capfd.readouterr().err == ""


def test_lost_helper_process_is_reported_as_503(post, monkeypatch):
    """The error is temporary: neither the template nor the grammar has caused it."""

    def fail(*_arguments):
        raise ChildUnavailable("the process was killed")

    monkeypatch.setattr("graft.native.children.process.ChildProcess.call", fail)
    messages = [{"role": "user", "content": "hi"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "a", "regex": "[a-z]{3}"}),
    ):
        status, body = post(path, **fields)
        assert status == 503
        assert body["error"]["type"] == "server_error"
        assert "the process was killed" in body["error"]["message"]


def test_grammars_are_checked_by_the_compilation_only(post, monkeypatch):
    """A separate check of a slow grammar would delay other requests.

    The engine compiles slow grammars in a separate queue.
    """

    def fail(*_arguments):
        raise AssertionError("the grammar was checked before its compilation")

    monkeypatch.setattr("graft.grammar.processes.POOL.call", fail)
    tag = {"begin": "<a>", "schema": {"const": 7}, "end": "</a>"}
    for fields in (
        {"regex": "[a-z]{4}"},
        {"guided_json": {"const": 5}},
        {"structured_outputs": {"json": {"const": 6}, "disable_additional_properties": True}},
        {"structured_outputs": {"structural_tag": {"tags": [tag], "triggers": ["<a>"]}}},
    ):
        status, body = post("/v1/completions", prompt="a", **fields)
        assert status == 200, body
    tag["schema"] = {"type": "string", "not": {"format": "email"}}
    for fields, words in (
        ({"regex": "("}, "regex: invalid regex"),
        ({"guided_json": tag["schema"]}, "JSON schema: cannot be enforced: #: not"),
        ({"structured_outputs": {"structural_tag": {"tags": [tag], "triggers": ["<"]}}}, "'<a>'"),
    ):
        status, body = post("/v1/completions", prompt="a", **fields)
        assert status == 400 and words in body["error"]["message"]


def test_template_error_does_not_contain_the_path_of_the_model(engine, http):
    with run_server(engine, chat_template="{{ raise_exception('not so') }}") as server:
        messages = [{"role": "user", "content": "hi"}]
        response = http.post(f"{server.url}/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == "demo: the chat template failed: not so"
    assert error["param"] == "messages"
