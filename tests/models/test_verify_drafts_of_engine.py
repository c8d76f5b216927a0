"""Compares tokens of an engine with those that `verify_drafts` chooses from the model's logits."""

from __future__ import annotations

import numpy as np
import pytest

from graft.cudagraph import StreamLane
from graft.models import Engine, Request
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.sampling import verify_drafts
from graft.tools.demo_model import demo_model

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 200}


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_verify_drafts_chooses_tokens_of_engine(device, stream, mode):
    """The engine speculates with its own drafts; here, its output is the draft."""
    target, drafter = demo_model()
    sampled = SAMPLED if mode == "coupled" else {}
    request = Request(prompt="code: QF-5702", max_tokens=30, seed=77, verify="coupled", **sampled)
    with Engine(target, drafter, max_batch_size=2) as engine:
        prompt = engine.tokenizer.chat([{"role": "user", "content": request.prompt}])
        [output] = engine.generate([request])
    tokens = list(output.tokens)
    sequence = [*prompt, *tokens[:-1]]
    model = LlamaModel.from_dir(device, target, slots=1, positions=len(sequence))
    lane = StreamLane(stream)
    assert model.kv.allocate(0, len(sequence))
    model.kv.set_table(lane, 0)
    rows = np.array([sequence, [0] * len(sequence), range(len(sequence))], np.int32)
    logits = device.zeros((len(sequence), model.vocab_size), "float32")
    model.forward(lane, Rows(*device.from_host(rows)), logits=logits)
    stream.synchronize()
    chosen = verify_drafts(
        logits.to_host()[None, len(prompt) - 1 :],
        [tokens[:-1]],
        mode=mode,
        seeds=[request.seed],
        positions=[len(prompt)],
        **sampled,
    )
    assert chosen == [tokens]
