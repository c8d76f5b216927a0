"""Tests with SmolLM2-135M-Instruct; without --full, skipped if the model is not downloaded."""

from __future__ import annotations

import pytest

from graft.models import Engine, Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo.prompts import llm_prompts
from graft.tools.demo.smollm import HEAD, cache_folder, smollm
from graft.tools.demo.tasks import held_out_tasks
from graft.tools.output_check import is_valid


@pytest.fixture(scope="module")
def folder(request):
    """Folder of the SmolLM2 checkpoint."""
    if not (cache_folder().is_dir() or request.config.getoption("--full")):
        pytest.skip(
            f"{cache_folder()} does not exist; create it with graft demo --llm or make test-full"
        )
    return smollm()


def make_requests(count):
    """Return `count` requests with grammars.

    If `count` is 3, the requests have a choice, a regular expression and a JSON schema. Otherwise
    they consist of all prompts of the demo command, and of generated tasks. Half of them are
    sampled.
    """
    prompts = llm_prompts()
    requests = []
    if count == 3:
        for prompt in (prompts[0], prompts[5], prompts[7]):
            requests.append(Request(prompt=prompt.text, grammar=prompt.grammar, max_tokens=48))
        return requests
    cases = [(prompt.text, prompt.grammar) for prompt in prompts]
    for task in held_out_tasks(count - len(cases)):
        cases.append((task.text, task_grammar(task)))
    for i, (text, grammar) in enumerate(cases):
        request = Request(
            prompt=text,
            grammar=grammar,
            max_tokens=48,
            seed=i,
            temperature=0.8 * (i % 2),
            verify="coupled",
        )
        requests.append(request)
    return requests


@pytest.mark.full
def test_real_model_speculation_keeps_text_and_structured_output(folder):
    """Texts with and without the package's EAGLE-3 head are equal, and outputs are valid."""
    requests = make_requests(20)
    texts = []
    for drafter in (None, HEAD):
        with Engine(folder, drafter, max_batch_size=2, max_length=512) as engine:
            outputs = engine.generate(requests)
            texts.append([output.text for output in outputs])
    assert texts[0] == texts[1] and len(outputs) == 20
    assert engine.stats.acceptance_length > 1.5
    num_finished = 0
    for request, output in zip(requests, outputs, strict=True):
        if output.finished:
            num_finished += 1
            assert request.grammar is None or is_valid(request.grammar, output.text)
    assert num_finished >= 3
