"""Grammars of outputs with an optional reasoning section, which apply to the text after it.

The scripted model writes outputs that begin with ``<think>``, with white space and ``<think>``, or
with other text. At a high temperature, sampled outputs deviate from the scripts at random places.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from engine_util import with_internal
from scripted_model import Script, write_scripted_model

from graft.grammar import GrammarSpec
from graft.models import Engine, Request

SCRIPTS = {
    "reasons": Script("<think>So</think>\nab12"),
    "reasons spelled": Script("\n<think>Or so</think>ba7", spelled=True),
    "joins": Script("<think>So far</think> ab12"),
    "answers": Script("<bb99"),
    "answers otherwise": Script("no answer"),
    "ends early": Script("<think>Let me"),
}
PATTERN = "<?[ab]{2,4}[0-9]{0,3}"
GRAMMAR = GrammarSpec.regex(PATTERN).after(
    "</think>", required=True, opening="<think>", skips_space=True
)
SPACE = r"[ \t\r\n]{0,16}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    return write_scripted_model(folder, SCRIPTS, added={"<think>": False, "</think>": False})


def requests(max_tokens: int) -> list[Request]:
    found = []
    for name in SCRIPTS:
        for temperature in (0.0, 12.0, 20.0):
            messages = [{"role": "user", "content": f"<script:{name}>"}]
            found.append(
                Request(
                    messages=messages,
                    temperature=temperature,
                    seed=len(found),
                    verify="coupled",
                    max_tokens=max_tokens,
                    grammar=GRAMMAR,
                )
            )
    return found


def outputs(model: Any, drafts: bool = True, max_tokens: int = 60, **options: Any) -> Any:
    """Return the tokens of all outputs, and the engine's statistics."""
    drafter = model if drafts else None
    with Engine(model, drafter, max_length=256, **with_internal(options)) as engine:
        found = engine.generate(requests(max_tokens))
        stats = engine.stats
    for output in found:
        if output.reason == "stop":
            section = rf"^{SPACE}<think>.*?</think>{SPACE}"
            text = re.sub(section, "", output.text, flags=re.DOTALL)
            assert re.fullmatch(PATTERN, text), output.text
        else:
            assert output.reason == "length"
    return [(output.tokens, output.reason) for output in found], stats


@pytest.fixture(scope="module")
def expected(model):
    return functools.cache(
        lambda max_tokens, **backend: outputs(
            model, False, max_tokens, max_batch_size=1, **backend
        )[0]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": 7},
        {"draft_length": 3, "draft_masking": "probe"},
        {"draft_length": 5, "draft_masking": "none"},
        {"draft_length": 7, "draft_tree": (2, 4)},
        {"drafts": False, "forced_drafts": True},
        pytest.param({"drafts": False, "generation": "graph"}, marks=pytest.mark.full),
        pytest.param({"draft_length": 3, "grammar_backend": "xgrammar"}, marks=pytest.mark.full),
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.full("[draft_length=7]", "masking=none")
def test_drafts_do_not_change_outputs_with_optional_reasoning(model, expected, options):
    found, _ = outputs(model, max_batch_size=8, **options)
    # The backends differ in the outputs that they can close before max_tokens.
    backend = {name: value for name, value in options.items() if name == "grammar_backend"}
    assert found == expected(60, **backend)
    reasons = [reason for _, reason in found]
    assert reasons.count("stop") >= len(SCRIPTS)


def test_token_joins_white_space_and_answer(model):
    """The scripted model has a token of the space after the marker and the first letter."""
    messages = [{"role": "user", "content": "<script:joins>"}]
    request = Request(messages=messages, max_tokens=60, grammar=GRAMMAR)
    with Engine(model, model, draft_length=3, max_length=256) as engine:
        [output] = engine.generate([request])
        assert output.text == SCRIPTS["joins"].text
        pieces = [engine.tokenizer.decode([token]) for token in output.tokens]
    assert pieces[pieces.index("</think>") + 1] == " a"


def test_preemption_does_not_change_outputs_with_optional_reasoning(model, expected):
    """After a preemption, the state of the matcher is rebuilt from the tokens of the request."""
    # With 512 prefill rows, all requests join at once, so that pages run out.
    sizes = {"max_batch_size": 8, "page_size": 4, "pages": 18, "prefill_rows": 512}
    found, stats = outputs(model, max_tokens=60, draft_length=3, **sizes)
    assert found == expected(60)
    assert stats.preemptions > 0


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 5])
def test_migration_does_not_change_outputs_with_optional_reasoning(model, expected, count):
    """Requests migrate before, during and after the reasoning section."""
    options: dict[str, Any] = {"max_batch_size": 16, "draft_length": 3, "max_length": 256}
    finished = {}
    with Engine(model, model, **options) as first, Engine(model, model, **options) as second:
        ids = [first.submit(request) for request in requests(60)]
        seen = dict.fromkeys(ids, 0)
        while first.busy or second.busy:
            for engine in (first, second):
                for event in engine.step() if engine.busy else ():
                    seen[event.id] += len(event.tokens)
                    if event.output is not None and event.output.reason != "moved":
                        finished[event.id] = event.output
            for name in ids:
                if seen[name] >= count and name not in finished:
                    seen[name] = -10_000
                    assert second.migrate_in(first.migrate_out(name)) == name
    assert [(finished[name].tokens, finished[name].reason) for name in ids] == expected(60)
