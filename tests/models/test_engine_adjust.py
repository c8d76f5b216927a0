"""Logit bias, penalties, minimum lengths, log probabilities and samples of engine requests.

`test_engine_equality` checks that drafts, other requests in the batch and preemption do not change
the outputs of such requests.
"""

from dataclasses import replace

import numpy as np
import pytest
from engine_util import TARGET, demo_engine, mixed_requests
from numpy_llama import llama_logits
from tiny_models import llama_config, make_tiny_llama, make_tiny_tokenizer

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Request

FREE = Request(tokens=[300, 301, 302], max_tokens=30)


def test_engine_allocates_pinned_memory_of_logit_tables_in_advance(monkeypatch):
    """Requests with bias and penalties do not fail if no pinned memory is left."""
    requests = [
        replace(FREE, logit_bias={5: 1.0}),
        replace(FREE, repetition_penalty=1.2),
        replace(FREE, allowed_ids=range(4, 200)),
    ]
    with demo_engine(speculation=False, max_batch_size=2) as engine:

        def refuse(*_):
            raise MemoryError("no pinned memory is left")

        with monkeypatch.context() as patch:
            patch.setattr(type(engine.device), "pinned", refuse)
            outputs = engine.generate(requests * 2)
        assert all(output.reason in ("length", "stop") for output in outputs)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "verify": "coupled"}],
    ids=str,
)
def test_allowed_ids_banned_ids_and_min_tokens(engine: Engine, sampling) -> None:
    """A stop id is not generated before `min_tokens`, unless the grammar allows nothing else."""
    stop = engine.tokenizer.stop_ids[0]
    bounded = {"allowed_ids": [50, 60, 70, stop], "banned_ids": [60], "logit_bias": {stop: 1e3}}
    choice = GrammarSpec.choice(["yes", "no"])
    common = {"tokens": [300, 301], "max_tokens": 30, **sampling}
    short, long, chosen, dead = engine.generate(
        [
            Request(**common, **bounded),
            Request(**common, **bounded, min_tokens=11),
            Request(**common, min_tokens=11, grammar=choice),
            Request(**common, allowed_ids=[stop], grammar=choice),
        ]
    )
    assert short.tokens == [stop] and short.finished
    assert len(long.tokens) == 12 and set(long.tokens[:11]) <= {50, 70}
    assert long.tokens[11] == stop and long.finished
    assert chosen.text in ("yes", "no") and chosen.finished
    assert dead.reason == "dead_end" and not dead.tokens


def test_penalties_prevent_or_cause_repetition(engine: Engine) -> None:
    """A large repetition penalty prevents any repetition, including repetition of prompt tokens.

    Negative presence and frequency penalties cause the repetition of one token.
    """
    ids = list(range(310, 330))
    bias = dict.fromkeys(ids, 100.0) | {310: 101.0}
    plain, distinct, repeated = engine.generate(
        [
            Request(
                tokens=[311, 312],
                max_tokens=16,
                allowed_ids=ids,
                logit_bias=bias,
                presence_penalty=penalty,
                frequency_penalty=penalty,
                repetition_penalty=repetition,
            )
            for penalty, repetition in ((0.0, 1.0), (0.0, 50.0), (-2.0, 1.0))
        ]
    )
    assert plain.reason == distinct.reason == repeated.reason == "length"
    assert len(set(distinct.tokens)) == 16 and not {311, 312} & set(distinct.tokens)
    assert len(set(repeated.tokens[6:])) == 1


def test_logprobs_equal_log_softmax_of_model_logits(tmp_path) -> None:
    """Log probabilities and top ids equal a NumPy computation, whatever the sampling parameters."""
    config = llama_config()
    weights = make_tiny_llama(tmp_path)
    make_tiny_tokenizer(tmp_path)
    prompt = [5, 17, 40]
    with Engine(tmp_path, max_batch_size=2, max_length=64) as engine:
        outputs = engine.generate(
            [
                Request(tokens=prompt, max_tokens=12, logprobs=4),
                Request(
                    tokens=prompt,
                    max_tokens=12,
                    logprobs=0,
                    temperature=2.0,
                    seed=1,
                    logit_bias={9: 5.0},
                    presence_penalty=2.0,
                    banned_ids=[0],
                ),
                Request(tokens=prompt, max_tokens=2),
            ]
        )
    assert outputs[2].logprobs is None
    assert [logprob.top[0][0] for logprob in outputs[0].logprobs] == outputs[0].tokens
    for output, num_top in zip(outputs[:2], (4, 0), strict=True):
        logits = llama_logits(weights, config, np.array([*prompt, *output.tokens]))
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = expected[len(prompt) - 1 :]
        assert output.logprobs is not None and len(output.logprobs) == len(output.tokens)
        for row, token, logprob in zip(expected, output.tokens, output.logprobs, strict=False):
            assert logprob.value == pytest.approx(row[token], abs=2e-4)
            assert [i for i, _ in logprob.top] == np.argsort(-row)[:num_top].tolist()
            top_values = np.sort(row)[::-1][:num_top]
            assert [value for _, value in logprob.top] == pytest.approx(top_values, abs=2e-4)


def test_samples_of_a_request_are_reproducible(engine: Engine) -> None:
    """Each of the `n` completions has an id and can be reproduced from its seed and sample number.

    `submit` refuses requests with ``n > 1``.
    """
    request = Request(tokens=[300], max_tokens=12, temperature=2.0, n=3, id="a")
    outputs = engine.generate([request, FREE])
    assert [o.id for o in outputs[:3]] == ["a/0", "a/1", "a/2"]
    assert [o.sample for o in outputs] == [0, 1, 2, 0]
    assert len({tuple(o.tokens) for o in outputs[:3]}) == 3
    assert len({o.seed for o in outputs[:3]}) == 1
    again = Request(tokens=[300], max_tokens=12, temperature=2.0, seed=outputs[2].seed, sample=2)
    assert engine.generate([again])[0].tokens == outputs[2].tokens
    events = list(engine.stream([request]))
    assert {e.id for e in events} == {"a/0", "a/1", "a/2"}
    engine.submit(request)
    refused = [e.output for e in engine.step() if e.output is not None]
    assert [o.reason for o in refused] == ["refused"] and "n is 3" in str(refused[0].error)


#: Stop id of the demo model, and four ids that occur in outputs of the requests without a grammar.
COMMON_IDS = [3, 224, 6, 51, 341]
#: Logit adjustments by name. Most of them ban or disfavour the stop id, so that outputs are long.
ADJUSTMENTS = {
    "plain": {},
    "allowed ids": {"allowed_ids": [300, 301, 302, 310, 311]},
    "banned ids": {"banned_ids": COMMON_IDS},
    "bias": {"logit_bias": {COMMON_IDS[0]: -8.0}},
    "repetition penalty": {"repetition_penalty": 1.5, "banned_ids": [3]},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "banned_ids": [3]},
    "min_tokens": {"min_tokens": 40},
}


@pytest.fixture(scope="module")
def adjusted_outputs():
    """Requests with each of the adjustments, and their outputs without a drafter."""
    requests = []
    for name, adjustment in ADJUSTMENTS.items():
        # With a grammar, outputs are short.
        for i, request in enumerate(mixed_requests(2 if name == "plain" else 1, seed=5)):
            request = replace(request, id=f"{name} {i}", max_tokens=48, **adjustment)
            if name != "plain":
                request = replace(request, grammar=None)
            requests.append(request)
    with demo_engine(max_batch_size=4, speculation=False) as engine:
        return requests, engine.generate(requests)


@pytest.mark.parametrize(
    ("options", "drafts_per_round"),
    [
        ({"draft_length": 1}, 1),
        ({"draft_length": 3, "draft_masking": "probe"}, 3),
        pytest.param({"draft_length": 3, "draft_masking": "none"}, 3, marks=pytest.mark.full),
        ({"draft_length": 6, "draft_tree": (2, 3)}, 3),
    ],
    ids=["chain", "probed chain", "unmasked chain", "tree"],
)
@pytest.mark.full("probed chain")
def test_drafts_follow_logit_adjustments(options, drafts_per_round, adjusted_outputs):
    """With the target as its own drafter, at least 95 % of the drafts are accepted.

    In a tree, these are the drafts on the most likely path. The adjustments change the logits of
    the drafter too. Outputs are the same as without a drafter.
    """
    requests, expected = adjusted_outputs
    with demo_engine(max_batch_size=4, drafter=TARGET, **options) as engine:
        outputs = engine.generate(requests)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    for name in ADJUSTMENTS:
        found = [output for output in outputs if output.id.startswith(name)]
        accepted = sum(output.accepted for output in found)
        # The first round of a request has no drafts, and the end of the output may cut the last.
        num_rounds = sum(output.rounds - 2 for output in found)
        assert num_rounds > 8
        assert accepted >= 0.95 * drafts_per_round * num_rounds, name
