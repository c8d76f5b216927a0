"""Text of responses whose characters span several tokens and rounds."""

import openai
import pytest
from bigram_model import Script, make_bigram_model
from serving_util import run_server

from graft.models.drafters import NGram
from graft.models.engine.engine import Engine

SCRIPT = Script.cut("日本語のテスト 🙂🙃 👩🏿‍🚀 👨‍👩‍👧‍👦 Привет, мир! 終わり🇯🇵 नमस्ते", seed=5)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server whose model writes the script, with up to seven drafts per round."""
    folder = make_bigram_model(tmp_path_factory.mktemp("bigram"), SCRIPT)["target"]
    with Engine(folder, NGram, draft_length=7, max_batch_size=2) as engine:
        with (
            run_server(engine) as server,
            openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
        ):
            yield client
        assert sum(engine.stats.accepted) > 50


@pytest.mark.parametrize("start", range(1, 5))
@pytest.mark.parametrize("stop", [[], ["мир"], ["👧", "мир"], ["\u200d🚀"]], ids=str)
def test_response_text_does_not_depend_on_rounds(client, start, stop):
    """Complete and streamed responses have the text, usage and stop reason of the script.

    The stop string is a part of the text on request.
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
