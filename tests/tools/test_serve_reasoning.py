"""Tests of the separation of reasoning sections from answers."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from graft.grammar import GrammarSpec, Vocabulary, make_backend
from graft.models.request import Limits
from graft.tools.serve.reasoning import ReasoningParser, has_reasoning, starts_in_reasoning
from graft.tools.serve.request_parser import RequestParser

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra serve is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")

from request_util import chat_request  # noqa: E402
from serving_util import PERSON, chat, open_client, response_format, run_server  # noqa: E402


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("text", "starts", "expected"),
    [
        ("<think>a < b</think>so", False, ("a < b", "so")),
        ("\n<think>a</think></think>", False, ("a", "</think>")),
        ("a</think>so", True, ("a", "so")),
        ("a</think>\n\nso\n", True, ("a", "so\n")),
        (f"a</think>{' ' * 15}\n so", True, ("a", " so")),
        ("a</think>\n", True, ("a", "")),
        ("\n\nso", False, ("", "\n\nso")),
        ("<think>a</think>so", True, ("a", "so")),
        ("<thin", False, ("", "<thin")),
        ("a</thi", True, ("a</thi", "")),
        ("so <think>a</think>", False, ("", "so <think>a</think>")),
    ],
)
def test_reasoning_parser_separates_reasoning_from_answer(text, starts, expected, size):
    parser = ReasoningParser(starts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    reasoning = ""
    answer = ""
    for i, piece in enumerate(pieces):
        new_reasoning, new_answer = parser.feed(piece, i == len(pieces) - 1)
        reasoning += new_reasoning
        answer += new_answer
    assert (reasoning, answer) == expected


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("text", "starts", "expected"),
    [
        ("\n<think>a < b</think>so", False, ("\n<think>a < b</think>", "so")),
        ("a</think>so", True, ("a</think>", "so")),
        ("a</think>\n\nso", True, ("a</think>\n\n", "so")),
        ("a</thi", True, ("a</thi", "")),
        ("<thin", False, ("", "<thin")),
    ],
)
def test_reasoning_parser_keeps_tags_on_request(text, starts, expected, size):
    parser = ReasoningParser(starts, keep_tags=True)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    fed = [parser.feed(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert tuple("".join(parts) for parts in zip(*fed, strict=True)) == expected


def test_prompt_determines_whether_output_starts_in_reasoning():
    assert not has_reasoning("<think>\n\n</think>\n\n")
    assert has_reasoning("assistant\n")
    assert starts_in_reasoning("qwen3", "assistant\n<think>\n")
    assert not starts_in_reasoning("qwen3", "assistant\n")
    assert starts_in_reasoning("deepseek_r1", "assistant\n")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("content", "starts"),
    [
        ('<think>a</think>{"name":', None),
        ('a</think>{"name":', None),
        ("<think>a</think>b<think>c", True),
        ("<think>a", True),
    ],
)
def test_continued_message_determines_whether_output_starts_in_reasoning(
    engine, name, content, starts
):
    """The grammar applies to the output from its start if the message has closed the section.

    Tags in other messages have no effect.
    """
    parser = RequestParser(engine.tokenizer, Limits(), "demo", 512, name)
    messages = [
        {"role": "user", "content": "<think></think>"},
        {"role": "assistant", "content": content},
    ]
    grammar = GrammarSpec.regex("[0-9]")
    request = parser.parse(chat_request(messages=messages, continue_final_message=True), grammar)
    assert request.reasoning == [starts]
    [one] = request.requests
    assert (one.grammar == grammar) == (starts is None)
    plain = parser.parse(chat_request(messages=messages[:1]), grammar)
    assert plain.reasoning == [name == "deepseek_r1"]


@pytest.mark.parametrize("name", [None, "qwen3"])
def test_template_of_reasoning_model_without_parser_is_logged(engine, monkeypatch, caplog, name):
    for template, has_tag in (("{{ m.content.split('</think>')[-1] }}", True), ("{{ m }}", False)):
        monkeypatch.setattr(engine.tokenizer, "tool_template", template)
        caplog.clear()
        RequestParser(engine.tokenizer, Limits(), "demo", 99, reasoning_parser=name)
        messages = [record.getMessage() for record in caplog.records]
        expected = has_tag and name is None
        assert ["--reasoning-parser (deepseek_r1 or qwen3)" in m for m in messages] == [
            True
        ] * expected


@pytest.mark.parametrize("stream", [False, True])
def test_server_applies_grammar_after_reasoning(engine, stream):
    """The demo model does not reason, so a logit bias makes it generate the end of the section."""
    tag = engine.tokenizer.encode("</think>")
    fields = {
        "response_format": response_format(PERSON),
        "logit_bias": {str(token): 200 - 10 * i for i, token in enumerate(tag)},
        "repetition_penalty": 100.0,
        "stream": stream,
    }
    with (
        run_server(engine, reasoning_parser="deepseek_r1") as server,
        open_client(server.url) as client,
    ):
        response = chat(client, **fields)
        if stream:
            parts = [chunk.choices[0].delta for chunk in response]
        else:
            parts = [response.choices[0].message]
    content = "".join(part.content or "" for part in parts)
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    assert content.startswith("{")
    assert "</think>" not in content + reasoning


def test_thinking_token_budget_limits_reasoning_before_free_text(engine):
    """The demo model does not end a section by itself. The answer is cut off by max_tokens."""
    fields = {"temperature": 1.5, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    with (
        run_server(engine, reasoning_parser="deepseek_r1") as server,
        open_client(server.url) as client,
    ):
        choice = chat(client, thinking_token_budget=12, max_tokens=30, **fields).choices[0]
    assert "</think>" in engine.tokenizer.decode(choice.token_ids[:12], special=True)
    assert choice.message.content and choice.message.reasoning_content
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 30)


@pytest.mark.parametrize("include", [True, False])
def test_usage_counts_reasoning_tokens_of_all_choices(engine, include):
    """The tokens count even if the response does not include the reasoning."""
    fields = {
        "temperature": 1.5,
        "seed": 3,
        "ignore_eos": True,
        "thinking_token_budget": 12,
        "max_tokens": 30,
        "include_reasoning": include,
        "n": 2,
    }
    with (
        run_server(engine, reasoning_parser="deepseek_r1") as server,
        open_client(server.url) as client,
    ):
        response = chat(client, **fields, return_token_ids=True)
        *_, last = chat(client, **fields, stream=True, stream_options={"include_usage": True})
        plain = chat(client, max_tokens=8)
    counts = []
    for choice in response.choices:
        texts = [engine.tokenizer.decode(choice.token_ids[:i], special=True) for i in range(31)]
        counts.append(next(i for i, text in enumerate(texts) if "</think>" in text))
    for usage in (response.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == sum(counts)
    details = plain.usage.completion_tokens_details
    assert details.reasoning_tokens == plain.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_or_part_of_the_content_on_request(engine, stream):
    """Without max_tokens for an answer, the whole output of deepseek_r1 is reasoning."""
    fields = {"stream": stream, "max_tokens": 8}
    texts = {}
    with (
        run_server(engine, reasoning_parser="deepseek_r1") as server,
        open_client(server.url) as client,
    ):
        for name in ("", "include_reasoning", "separate_reasoning"):
            response = chat(client, **fields, **({name: False} if name else {}))
            if stream:
                parts = [chunk.choices[0].delta for chunk in response]
            else:
                parts = [response.choices[0].message]
            reasoning = [getattr(part, "reasoning_content", None) or "" for part in parts]
            assert reasoning == [getattr(part, "reasoning", None) or "" for part in parts]
            texts[name] = "".join(reasoning), "".join(part.content or "" for part in parts)
    reasoning, content = texts[""]
    assert reasoning and not content
    assert texts["include_reasoning"] == ("", "")
    assert texts["separate_reasoning"] == ("", reasoning)


def test_bad_words_of_several_tokens_apply_after_reasoning(engine):
    """The texts that the model can generate are those that the request's grammar accepts."""
    tokenizer = engine.tokenizer
    parser = RequestParser(tokenizer, Limits(), "demo", 512, "deepseek_r1")
    fields = {"messages": [{"role": "user", "content": "hi"}], "bad_words": ["Olga Novak"]}
    [request] = parser.parse(chat_request(**fields), None).requests
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer.backend, tokenizer.vocab_size, tokenizer.stop_ids
    )
    compiled = make_backend("llguidance", vocabulary).compile(request.grammar)

    def allows(text):
        matcher = compiled.matcher()
        return all(map(matcher.accept, tokenizer.encode(text, special=False)))

    assert allows("name: Olga Novak</think>name: Olga")
    assert not allows("name: Olga</think>name: Olga Novak")
