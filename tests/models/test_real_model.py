"""SmolLM2-135M-Instruct. Skipped unless it has been downloaded or --full is given."""

from __future__ import annotations

import pytest

from graft.models import Engine, Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo_prompts import llm_prompts
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.smollm import HEAD, cache_folder, smollm
from graft.tools.validity import is_valid


@pytest.fixture(scope="module")
def folder(request):
    if not (cache_folder().is_dir() or request.config.getoption("--full")):
        pytest.skip(
            f"{cache_folder()} does not exist; create it with graft demo --llm or make test-full"
        )
    return smollm()


def make_requests(count):
    """Return three requests (choice, regular expression, schema), or demo and generated ones."""
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
def test_real_model_speculation_keeps_text_and_structured_output(folder, count):
    """With and without the EAGLE-3 head of the package. Finished outputs satisfy their grammars."""
    requests = make_requests(count)
    texts = []
    for drafter in (None, HEAD):
        with Engine(folder, drafter, max_batch_size=2, max_length=512) as engine:
            outputs = engine.generate(requests)
            texts.append([output.text for output in outputs])
    assert texts[0] == texts[1] and len(outputs) == count
    assert engine.stats.acceptance_length > 1.5
    finished = [(r.grammar, o.text) for r, o in zip(requests, outputs, strict=True) if o.finished]
    assert len(finished) >= 3
    assert all(is_valid(grammar, text) for grammar, text in finished if grammar is not None)
