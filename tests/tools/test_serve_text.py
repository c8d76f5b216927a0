"""Text of responses whose characters span several tokens and rounds."""

import random

import pytest
from bigram_model import Script, make_bigram_model
from request_util import feed_calls
from serving_util import open_client, run_server

from graft.models.drafters import NGram
from graft.models.engine.engine import Engine
from graft.tools.serve.reasoning import ReasoningParser
from graft.tools.serve.tool_calls import ToolChoice
from graft.tools.serve.tool_formats import TOOL_FORMATS
from graft.tools.serve.tool_formats.parser import ToolCallParser

SCRIPT = Script.cut("日本語のテスト 🙂🙃 👩🏿‍🚀 👨‍👩‍👧‍👦 Привет, мир! 終わり🇯🇵 नमस्ते", seed=5)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server whose model writes the script, with up to seven drafts per round."""
    folder = make_bigram_model(tmp_path_factory.mktemp("bigram"), SCRIPT)["target"]
    with Engine(folder, NGram, draft_length=7, max_batch_size=2) as engine:
        with run_server(engine) as server, open_client(server.url) as client:
            yield client
        assert sum(engine.stats.accepted) > 0


@pytest.mark.parametrize("start", range(1, 5))
@pytest.mark.parametrize("stop", [[], ["мир"], ["👧", "мир"], ["\u200d🚀"]], ids=str)
def test_response_text_does_not_depend_on_rounds(client, start, stop):
    """Complete and streamed responses have the text, usage and stop reason of the script.

    If the request asks for it, the text includes the stop string.
    """
    reason, tokens, text = SCRIPT.output(start, stop=stop)
    fields = {
        "model": "demo",
        "prompt": SCRIPT.prompt(start),
        "max_tokens": 100,
        "temperature": 0,
        "stop": stop,
    }
    response = client.completions.create(**fields, logprobs=0)
    (choice,) = response.choices
    matched = next((s for s in stop if SCRIPT.output(start)[2][len(text) :].startswith(s)), None)
    assert choice.text == text and choice.finish_reason == "stop"
    assert response.usage.completion_tokens == len(tokens)
    assert choice.stop_reason == matched and (reason == "stop_string") == bool(matched)
    assert len(choice.logprobs.tokens) == len(tokens) - (reason == "stop")

    pieces = []
    for chunk in client.completions.create(
        **fields,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"include_stop_str_in_output": True},
    ):
        pieces += [c.text for c in chunk.choices]
    assert "".join(pieces) == text + (matched or "")
    assert chunk.usage.completion_tokens == len(tokens)
    assert len(pieces) < len(tokens)


FUNCTIONS = [{"name": "get", "parameters": {"type": "object"}}, {"name": "日本"}]
#: Parts of texts with calls, complete and incomplete, in all notations.
PARTS = [
    *("<tool_call>", "</tool_call>", "<function=get>", "</function>", "<parameter=city>"),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
    '{"name": "get", "arguments": {"city": "日本🙂"}}',
    '{"name": "日本", "parameters": {}}',
    '[{"name": "get", "arguments": {"n": 3}}]',
    'get{"city": "x"}',
    '[get(city="é", n=3)]',
    *("text", "日", "<", "[", "{", "}", "]", '"', "get(", "\\u65e5", '\\"', "null", " ", "\n"),
]


def cut(text, rng):
    """Cut a text at random, or into single characters; the last piece may be empty."""
    if rng.random() < 0.3:
        return [*text, ""]
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def feed_tool_calls(tool_format, required, pieces):
    """Return the content and calls of a text, in a streamed and in a complete response."""
    parser = ToolCallParser(ToolChoice(FUNCTIONS, required=required), tool_format)
    return *feed_calls(parser, pieces), parser.cut_text


@pytest.mark.parametrize(
    "seeds",
    [range(300), pytest.param(range(300, 9000), marks=pytest.mark.full)],
    ids=["few", "many"],
)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_tool_calls_do_not_depend_on_pieces_of_text(name, seeds):
    """The parser finds the same content and calls, however the text is cut into pieces."""
    for seed in seeds:
        rng = random.Random(seed)
        text = "".join(rng.choices(PARTS, k=rng.randint(1, 8)))
        for required in (False, True):
            expected = feed_tool_calls(TOOL_FORMATS[name], required, [text])
            for _ in range(3):
                pieces = cut(text, rng)
                found = feed_tool_calls(TOOL_FORMATS[name], required, pieces)
                assert found == expected, f"seed {seed}: {pieces}"


@pytest.mark.parametrize("starts_in_reasoning", [False, True])
@pytest.mark.parametrize("keep_tags", [False, True])
def test_reasoning_does_not_depend_on_pieces_of_text(starts_in_reasoning, keep_tags):
    for seed in range(500):
        rng = random.Random(seed)
        parts = ["<think>", "</think>", "<", "think>", "</", "日", " ", "\n", "x"]
        text = "".join(rng.choices(parts, k=rng.randint(1, 8)))
        results = []
        for pieces in ([text], cut(text, rng), cut(text, rng)):
            parser = ReasoningParser(starts_in_reasoning, keep_tags)
            found = [parser.feed(p, i == len(pieces) - 1) for i, p in enumerate(pieces)]
            results.append(tuple("".join(column) for column in zip(*found, strict=True)))
        assert results[0] == results[1] == results[2], f"seed {seed}"
