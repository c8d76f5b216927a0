"""Speculation does not change sampling: penalties, seeds, log probabilities, greedy choices.

The oracles are the same requests without speculation, and computations from log probabilities with
NumPy.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from conformance_util import GUIDED, TEXTS, ask, one_by_one, results
from public_issues import issue

from graft.models import Engine, Request
from graft.tools.demo_model import demo_model

K = 3


@pytest.fixture(scope="module")
def demo():
    """The demo model with its EAGLE-3 head."""
    target, drafter = demo_model()
    with Engine(target, drafter, max_batch_size=4, max_length=256, draft_length=K) as engine:
        yield engine


@pytest.fixture(scope="module")
def demo_plain():
    with Engine(demo_model()[0], max_batch_size=1, max_length=256) as engine:
        yield engine


def free(start=300, **fields):
    """Return an unconstrained request for the demo model."""
    return Request(tokens=[start, start + 1, start + 2], **{"max_tokens": 30, **fields})


def coupled(start=300, **fields):
    return free(start, **{"temperature": 0.9, "verify": "coupled", "seed": 4, **fields})


@issue(
    "vLLM",
    18902,
    "The frequency penalty has no effect with speculation, without a warning.",
    "The counts of the penalty include the drafts before each row; outputs are the same as without "
    "speculation, and differ from those without a penalty.",
)
@issue(
    "TensorRT-LLM",
    17701,
    "One-model speculation ignores repetition, presence and frequency penalties.",
    "As above for each of the three penalties.",
)
@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 1.5}, {"presence_penalty": 1.8}, {"repetition_penalty": 1.7}],
    ids=lambda penalty: next(iter(penalty)),
)
@pytest.mark.full("repetition_penalty")
def test_penalties_count_drafts(demo, demo_plain, penalty):
    kinds = [
        kind
        for start in (300, 340, 380)
        for kind in (partial(free, start), partial(coupled, start))
    ]
    requests = [kind(**penalty) for kind in kinds]
    outputs = demo.generate(requests)
    assert results(outputs) == one_by_one(demo_plain, requests)
    without = demo.generate([kind() for kind in kinds])
    assert results(outputs) != results(without)
    repeats = [sum(max(Counter(o.tokens).values()) for o in group) for group in (outputs, without)]
    assert repeats[0] < repeats[1]


@issue(
    "vLLM",
    6038,
    "With speculation, the same request with the same seed has a different output each time.",
    "The output is the same alone, in a batch, and a second time; with rejection sampling too.",
)
def test_seed_determines_the_output(demo):
    for verify in ("coupled", "rejection"):
        request = coupled(verify=verify)
        [first] = demo.generate([request])
        outputs = demo.generate([request, coupled(320, seed=9), request, free(360)])
        assert outputs[0].tokens == outputs[2].tokens == first.tokens


@issue(
    "vLLM",
    13196,
    "The output with speculation is the same for all seeds.",
    "Eight seeds have at least seven different outputs.",
)
def test_seeds_have_different_outputs(demo):
    for verify in ("coupled", "rejection"):
        outputs = demo.generate([coupled(seed=seed, verify=verify) for seed in range(8)])
        assert len({tuple(output.tokens) for output in outputs}) >= 7


@issue(
    "vLLM",
    9441,
    "Requests with different seeds in one batch with speculation write gibberish.",
    "Greedy and sampled requests with and without seeds do not affect each other.",
)
def test_seeds_of_a_batch_are_independent(demo, demo_plain, drafting):
    requests = [free(310), coupled(seed=1), free(330, seed=7), coupled(350, seed=2)]
    outputs = demo.generate(requests)
    assert results(outputs) == one_by_one(demo_plain, requests)
    unseeded = ask("list", temperature=8.0)
    mixed = drafting.generate([ask("prose", seed=5), unseeded, ask("list", seed=6), unseeded])
    assert [mixed[0].text, mixed[2].text] == [TEXTS["prose"], TEXTS["list"]]


@issue(
    "llama.cpp",
    25618,
    "Greedy outputs depend on the number of rows that are verified together; with two rows, 57 of "
    "75 differ from decoding without speculation.",
    "Greedy outputs are bit for bit those without speculation, for all widths from 2 to 8.",
)
@pytest.mark.parametrize(
    "length",
    [1, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full), 7],
)
@pytest.mark.full("[1]")
def test_greedy_outputs_do_not_depend_on_the_draft_length(demo_plain, length):
    target, drafter = demo_model()
    requests = [free(start, logprobs=1) for start in range(300, 420, 20)]
    with Engine(target, drafter, max_batch_size=3, draft_length=length) as engine:
        outputs = engine.generate(requests)
    expected = [demo_plain.generate([request])[0] for request in requests]
    assert results(outputs) == results(expected)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]


@issue(
    "llama.cpp",
    27972,
    "With speculation, the log probability of every token is 0.",
    "Log probabilities are those of the target without speculation; those of all ids sum up to 1.",
)
@issue(
    "vLLM",
    34497,
    "Log probabilities with speculation are wrong.",
    "As above, at a temperature and greedy.",
)
@issue("vLLM", 17876, "With n-gram drafts, log probabilities are 0.", "As above.")
def test_log_probabilities_with_speculation(demo, demo_plain):
    requests = [free(logprobs=20), coupled(logprobs=20), free(360, logprobs=3, seed=2)]
    outputs = demo.generate(requests)
    assert sum(output.accepted for output in outputs) > 10
    for request, output in zip(requests, outputs, strict=True):
        [expected] = demo_plain.generate([request])
        assert output.logprobs == expected.logprobs
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            top = dict(logprob.top)
            assert logprob.value < 0 and top.get(token, logprob.value) == logprob.value
            assert sum(np.exp([value for _, value in logprob.top])) <= 1 + 1e-5


@issue(
    "vLLM",
    9423,
    "Speculation breaks guided decoding: n-gram drafts change outputs, and requests for JSON end "
    "the engine.",
    "Sampled guided outputs are the same with the drafter and without one.",
)
def test_guided_sampling_with_and_without_speculation(drafting, plain):
    requests = []
    for seed in range(6):
        fields = {"grammar": GUIDED, "temperature": 12.0, "verify": "coupled", "max_tokens": 50}
        requests.append(ask("person", seed=seed, logprobs=2, logprobs_masked=True, **fields))
    outputs = drafting.generate(requests)
    assert results(outputs) == one_by_one(plain, requests)
    assert len({output.text for output in outputs}) > 3
