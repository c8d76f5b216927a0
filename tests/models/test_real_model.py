"""A language model that people know, where `graft demo --llm` has put it already."""

from __future__ import annotations

import pytest

from graft.models import Engine, Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo_prompts import llm_prompts
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.smollm import HEAD, cache, smollm
from graft.tools.validity import is_valid


@pytest.fixture(scope="module")
def folder(request):
    if not (cache().is_dir() or request.config.getoption("--full")):
        pytest.skip(f"{cache()} is not there: graft demo --llm and make test-full make it")
    return smollm()


def asked(count):
    """A choice, an expression and a schema; or the demo's and as many of a generator's as lack,
    greedy and sampled."""
    if count == 3:
        return [
            Request(prompt=p.text, grammar=p.grammar, max_tokens=48)
            for p in (llm_prompts()[i] for i in (0, 5, 7))
        ]
    both = [(p.text, p.grammar) for p in llm_prompts()]
    both += [(task.text, task_grammar(task)) for task in held_out_tasks(count - len(both))]
    return [
        Request(
            prompt=text,
            grammar=grammar,
            max_tokens=48,
            seed=i,
            temperature=0.8 * (i % 2),
            verify="coupled",
        )
        for i, (text, grammar) in enumerate(both)
    ]


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.full)])
def test_drafts_change_no_text_and_what_is_guided_is_valid(folder, count):
    """Answers with the head that travels with the package and without; those that are not cut obey
    their grammars, and drafts are accepted."""
    requests = asked(count)
    texts = []
    for drafter in (None, HEAD):
        with Engine(folder, drafter, max_batch_size=2, max_length=512) as engine:
            outputs = engine.generate(requests)
            texts.append([output.text for output in outputs])
    assert texts[0] == texts[1] and len(outputs) == count
    assert engine.stats.acceptance_length > 1.5
    ended = [(r.grammar, o.text) for r, o in zip(requests, outputs, strict=True) if o.finished]
    assert len(ended) >= 3
    assert all(is_valid(grammar, text) for grammar, text in ended if grammar is not None)
