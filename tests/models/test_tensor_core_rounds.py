"""Tests of decoding rounds that run the GPU kernels (form ``warp``) on the soft device."""

import numpy as np
import pytest
from engine_util import with_internal
from tiny_models import llama_config, make_tiny_eagle3, make_tiny_llama, make_tiny_tokenizer

from graft.cudagraph.device import Device
from graft.models.engine.engine import Engine
from graft.models.llm import llama
from graft.models.llm.kernels.library import ModelKernels
from graft.models.request import Request
from graft.models.round import prefill
from graft.sampling import arrays

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
LAYER = ("qkv", "attention", "attention out", "gate, up", "down")


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return a factory of engines with warp kernels, with or without an EAGLE-3 head."""
    monkeypatch.setattr(
        llama, "ModelKernels", lambda device, _, *more: ModelKernels(device, "warp", *more)
    )
    monkeypatch.setattr(arrays, "row_parts", lambda device, columns: 2)
    make_tiny_llama(tmp_path / "target", dtype="bfloat16", **SIZES)
    make_tiny_tokenizer(tmp_path / "target")
    make_tiny_eagle3(tmp_path / "head", llama_config(**SIZES), dtype="bfloat16")
    return lambda head, **more: Engine(
        tmp_path / "target",
        tmp_path / "head" if head else None,
        max_batch_size=2,
        max_length=96,
        grammar_transport="native",
        **with_internal({"draft_length": 3} | more),
    )


def test_tensor_core_round_has_five_launches_per_layer(engine, monkeypatch):
    """A round launches five kernels per decoder layer and no separate norm kernels.

    Extrapolated to 32 layers, a round has at most 215 launches. The greedy outputs equal those
    without speculation.
    """
    # warming takes long on the soft device
    monkeypatch.setattr(prefill.Prefill, "warm", lambda *_: [])
    rng = np.random.default_rng(4)
    requests = [
        Request(tokens=rng.integers(2, 320, n).tolist(), max_tokens=3, banned_ids=[0])
        for n in (3, 9)
    ]
    answers = []
    for head in (True, False):
        with engine(head) as one:
            answers.append([output.tokens for output in one.generate(requests)])
            if not head:
                continue
            names = [
                node.name
                for graph in one.graphs[1, 3, "host"].graphs
                for node in graph.nodes
                if node.kind == "kernel"
            ]
            assert [names.count(name) for name in LAYER] == [3 + 3] * len(LAYER)
            assert "norm" not in names and len(names) + (32 - 3) * len(LAYER) <= 215
    assert answers[0] == answers[1] and len({*answers[0][0]}) > 2


@pytest.mark.full
@pytest.mark.parametrize("activations", ["float32", "rounded"])
def test_prefill_kernels_are_loaded_before_first_request(engine, monkeypatch, activations):
    """An engine loads all prefill kernels at creation. Prompts of any length load no others."""
    asked = []
    load = Device.load

    def note(self, source, *defines, **more):
        asked.append((str(source), repr(defines), repr(more)))
        return load(self, source, *defines, **more)

    monkeypatch.setattr(Device, "load", note)
    with engine(True, activations=activations, draft_length=4) as one:
        before = list(asked)
        one.generate([Request(tokens=[300 + n % 7] * n, max_tokens=2) for n in (2, 12, 25, 50, 90)])
    assert len(before) > 10 and asked == before
