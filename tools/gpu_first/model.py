"""An engine on weights that are made on the device, behind checkpoints that hold nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from graft.cudagraph.memory import DeviceArray
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.drafters import eagle3
from graft.models.engine.engine import Engine
from graft.models.llm import llama
from graft.models.llm.weights import Interleave, Weights
from graft.models.request import Request
from graft.tools.demo_model import demo_model
from graft.tools.gpu_first.bench import Bench, fill_random


class RandomWeights(Weights):
    """Checks names and shapes as ever, and takes values from nowhere."""

    def matrix(self, name: str, rows: int, columns: int) -> DeviceArray:
        """Random, for inputs and outputs of one size."""
        return self.stacked({name: rows}, columns)

    def stacked(
        self,
        parts: dict[str, int],
        columns: int,
        interleave: Interleave | None = None,
    ) -> DeviceArray:
        """The same of several; what is random needs no order."""
        for name, rows in parts.items():
            self.read(name, (rows, columns))
        array = self.device.empty((sum(parts.values()), columns), "bfloat16")
        fill_random(self.device, array, math.sqrt(3 / columns))
        return array

    def vector(self, name: str, *shape: int) -> DeviceArray:
        """Ones."""
        self.read(name, shape)
        return self.device.from_host(np.ones(shape, np.float32))


def layer_tensors(shape: dict[str, int], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one decoder layer's tensors, whose attention reads ``width`` columns."""
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    dim = shape["head_dim"]
    queries, keys = (shape[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    products = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}.{name}.weight": size for name, size in products.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> None:
    """A checkpoint whose tensors take no place on a disk that knows holes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(demo_model()[0] / "tokenizer.json", folder)
    header = dict[str, Any]()
    at = 0
    for name, size in tensors.items():
        dtype, nbytes = ("I32", 4) if name == "d2t" else ("BF16", 2)
        end = at + math.prod(size) * nbytes
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


@contextmanager
def random_engine(b: Bench, drafts: int, programmatic: bool) -> Iterator[Engine]:
    """An engine of the bench's shape for 8 requests, drafting by an EAGLE-3 head where asked."""
    hidden = b.shape["hidden_size"]
    vocab = b.shape["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 1024,
        "eos_token_id": 3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **b.shape,
    }
    tensors = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(b.shape["num_hidden_layers"]):
        tensors |= layer_tensors(b.shape, f"model.layers.{i}", hidden)
    columns = min(32000, vocab // 2)
    taps = [0, 1, 2] if b.small else [2, 16, 29]
    names = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": columns,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps},
    }
    head = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (columns, hidden),
        "d2t": (columns,),
        **layer_tensors(b.shape, "midlayer", 2 * hidden),
    }
    # An engine wants a backend, which requests without grammars do not use.
    backend: Any = "auto" if guided() else lambda vocabulary: mock.MagicMock()
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(llama, "Weights", RandomWeights),
        mock.patch.object(eagle3, "Weights", RandomWeights),
    ):
        target = Path(place, "target")
        drafter = Path(place, "head")
        write_folder(target, config, tensors)
        write_folder(drafter, config | names, head)
        with Engine(
            target,
            drafter if drafts else None,
            max_batch_size=8,
            max_length=1024,
            draft_length=drafts or 1,
            programmatic=programmatic,
            grammar_backend=backend,
            timeline=True,
        ) as engine:
            yield engine


def guided() -> bool:
    """Whether a grammar's backend is installed."""
    return importlib.util.find_spec("llguidance") is not None


def round_parts(engine: Engine, batch: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a round on the device's clock, guided where a grammar's backend is installed,
    and of its parts."""
    grammar = GrammarSpec.regex("[a-z ]{400,}") if guided() else None
    requests = [
        Request(tokens=[5 + i] * 100, grammar=grammar, max_tokens=tokens) for i in range(batch)
    ]
    engine.generate(requests)
    engine.reset_stats()
    engine.generate(requests)
    stats = engine.stats
    return {
        name: ns / stats.rounds / 1e6
        for name, ns in {
            "guided round" if guided() else "round": stats.round_ns,
            **stats.part_ns,
        }.items()
    }
