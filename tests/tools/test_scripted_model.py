"""Tests of the scripted model. Other tests use it to control what the model of a server writes."""

from __future__ import annotations

import pytest
from scripted_model import Script, write_scripted_model

from graft.grammar import GrammarSpec
from graft.models import Engine, Request

SCRIPTS = {
    "languages": Script("Hello, hello! 日本語 👍 привет 👍 мир"),
    "other stop": Script("<think>yes</think>no<call>", stop="<end>"),
    "again": Script("again and ", stop=""),
    "spelled": Script("<call>no</call>", spelled=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(
        tmp_path_factory.mktemp("scripted"),
        SCRIPTS,
        added={"<think>": False, "</think>": False, "<call>": True, "</call>": True},
        stops=("<eos>", "<end>"),
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_scripted_model_writes_its_scripts(folder, drafts):
    """In the second case, the model is its own drafter, so rounds commit several tokens."""
    with Engine(folder, folder if drafts else None, max_batch_size=4, max_length=256) as engine:

        def ask(name, grammar=None):
            messages = [{"role": "user", "content": f"Write <script:{name}>, please."}]
            return Request(
                messages=messages, max_tokens=60, skip_special_tokens=False, grammar=grammar
            )

        requests = [ask(name) for name in SCRIPTS]
        outputs = dict(zip(SCRIPTS, engine.generate(requests), strict=True))
        number = GrammarSpec.json_schema({"type": "array", "items": {"type": "number"}})
        [closed] = engine.generate([ask("languages", number)])
        [resumed] = engine.generate([ask("spelled", GrammarSpec.regex("0<call>.*"))])
        ids = {name: engine.tokenizer.backend.token_to_id(name) for name in ("<call>", "<end>")}
    for name, output in outputs.items():
        if SCRIPTS[name].stop:
            assert (output.text, output.reason) == (SCRIPTS[name].text, "stop")
    assert outputs["again"].text.startswith("again and again and again and ")
    assert outputs["again"].reason == "length"
    assert outputs["other stop"].tokens[-2:] == [ids["<call>"], ids["<end>"]]
    assert ids["<call>"] not in outputs["spelled"].tokens
    # An output ends even if a mask forbids the script.
    assert (closed.text, closed.reason) == ("[]", "stop")
    assert (resumed.text, resumed.reason) == ("0<call>no</call>", "stop")
    assert (outputs["languages"].rounds < 20) == drafts
