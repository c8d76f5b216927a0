"""Bias, bounds, least lengths, log probabilities and samples, as a user of the engine has them.

That drafts, batches and preemption change none of it is checked in `test_engine_equality`.
"""

import numpy as np
import pytest
from numpy_llama import llama_logits
from tiny_models import llama_config, make_tiny_llama, make_tiny_tokenizer

from graft.grammar.grammar_spec import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Request

FREE = Request(tokens=[300, 301, 302], max_tokens=30)


def test_hard_bounds_and_least_lengths(engine: Engine) -> None:
    """Only what is allowed and not banned comes; a stop id that is wanted most comes no sooner than
    it may; a grammar that is done ends all the same."""
    stop = engine.tokenizer.stop_ids[0]
    bounded = {"allowed_ids": [50, 60, 70, stop], "banned_ids": [60], "logit_bias": {stop: 1e3}}
    guided = GrammarSpec.choice(["yes", "no"])
    for how in ({}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "verify": "coupled"}):
        short, long, done, dead = engine.generate(
            [
                Request(tokens=[300, 301], max_tokens=30, **bounded, **how),
                Request(tokens=[300, 301], max_tokens=30, min_tokens=11, **bounded, **how),
                Request(tokens=[300, 301], max_tokens=30, min_tokens=11, grammar=guided, **how),
                Request(
                    tokens=[300, 301], max_tokens=30, allowed_ids=[stop], grammar=guided, **how
                ),
            ]
        )
        assert short.tokens == [stop] and short.finished
        assert len(long.tokens) == 12 and set(long.tokens[:11]) <= {50, 70}
        assert long.tokens[11] == stop and long.finished
        assert done.text in ("yes", "no") and done.finished
        assert dead.reason == "dead_end" and not dead.tokens


def test_penalties_change_what_repeats(engine: Engine) -> None:
    """A repetition penalty far beyond all gaps lets every token come once, and none of the prompt;
    negative presence and frequency penalties come to repeat one."""
    ids = list(range(310, 330))
    bias = dict.fromkeys(ids, 100.0) | {310: 101.0}
    alike, once, always = engine.generate(
        [
            Request(
                tokens=[311, 312],
                max_tokens=16,
                allowed_ids=ids,
                logit_bias=bias,
                presence_penalty=one,
                frequency_penalty=one,
                repetition_penalty=other,
            )
            for one, other in ((0.0, 1.0), (0.0, 50.0), (-2.0, 1.0))
        ]
    )
    assert alike.reason == once.reason == always.reason == "length"
    assert len(set(once.tokens)) == 16 and not {311, 312} & set(once.tokens)
    assert len(set(always.tokens[6:])) == 1


def test_log_probabilities_are_the_models_own(tmp_path) -> None:
    """Value and best ids are NumPy's log-softmax of the model's logits, whatever is sampled; a
    greedy token is the best."""
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
    assert [told.top[0][0] for told in outputs[0].logprobs] == outputs[0].tokens
    for output, most in zip(outputs[:2], (4, 0), strict=True):
        x = llama_logits(weights, config, np.array([*prompt, *output.tokens]))
        x = (x - np.log(np.exp(x).sum(-1, keepdims=True)))[len(prompt) - 1 :]
        assert output.logprobs is not None and len(output.logprobs) == len(output.tokens)
        for row, token, told in zip(x, output.tokens, output.logprobs, strict=False):
            assert told.value == pytest.approx(row[token], abs=2e-4)
            assert [i for i, _ in told.top] == np.argsort(-row)[:most].tolist()
            assert [v for _, v in told.top] == pytest.approx(np.sort(row)[::-1][:most], abs=2e-4)


def test_samples_of_one_request(engine: Engine) -> None:
    """n completions come in order, streamed too, under names of their own; each can be had again by
    the seed that is told and its number; submitted as one they are refused by name."""
    asked = Request(tokens=[300], max_tokens=12, temperature=2.0, n=3, id="a")
    outputs = engine.generate([asked, FREE])
    assert [o.id for o in outputs[:3]] == ["a/0", "a/1", "a/2"]
    assert [o.sample for o in outputs] == [0, 1, 2, 0]
    assert len({tuple(o.tokens) for o in outputs[:3]}) == 3
    assert len({o.seed for o in outputs[:3]}) == 1
    again = Request(tokens=[300], max_tokens=12, temperature=2.0, seed=outputs[2].seed, sample=2)
    assert engine.generate([again])[0].tokens == outputs[2].tokens
    events = list(engine.stream([asked]))
    assert {e.id for e in events} == {"a/0", "a/1", "a/2"}
    engine.submit(asked)
    refused = [e.output for e in engine.step() if e.output is not None]
    assert [o.reason for o in refused] == ["refused"] and "n is 3" in str(refused[0].error)
