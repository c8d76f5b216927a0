"""A language model that people know, where `graft demo --llm` has put it already."""

from __future__ import annotations

import pytest

from graft.models import Engine, Request
from graft.models.drafters import NGram
from graft.tools.demo_prompts import llm_prompts
from graft.tools.smollm import cache
from graft.tools.validity import is_valid


@pytest.fixture(scope="module")
def folder():
    if not cache().is_dir():
        pytest.skip(f"{cache()} is not there: graft demo --llm makes it")
    return cache()


def test_drafts_change_no_text_and_what_is_guided_is_valid(folder):
    """Short answers under a choice, an expression and a schema, with drafts and without."""
    prompts = [llm_prompts()[i] for i in (0, 5, 7)]
    requests = [Request(prompt=p.text, grammar=p.grammar, max_tokens=48) for p in prompts]
    texts = []
    for drafter in (NGram, None):
        with Engine(folder, drafter, max_batch_size=2, max_length=512) as engine:
            texts.append([output.text for output in engine.generate(requests)])
    assert texts[0] == texts[1]
    assert all(is_valid(p.grammar, text) for p, text in zip(prompts, texts[0], strict=True))
