"""Models and engines with random weights that are generated on the device.

The checkpoint is a sparse file of zeros, so that a model of full size needs neither a download nor
space on the disk.
"""

import json
import math
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from gpu_util import random_array
from model_util import make_rows

from graft.models.cache.kv import PagedKV
from graft.models.drafters import eagle3
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.models.llm import llama
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.weights import Weights
from graft.tools.demo_model import demo_model

BATCH = 8
MAX_LENGTH = 4096
PAGE_SIZE = 16
#: Numbers of rows of measured products and forward passes.
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
#: Sizes of an 8B Llama, and of a model that the soft device can run.
FULL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
}


class RandomWeights(Weights):
    """Weights loader that checks names and shapes of a checkpoint, but returns random values."""

    def matrix(self, name, rows, columns):
        return self.stacked({name: rows}, columns)

    def stacked(self, parts, columns, *args, bias=False):
        """Return a random matrix whose product has outputs as large as its inputs."""
        for name, rows in parts.items():
            self.read(name, (rows, columns))
        size = (sum(parts.values()), columns)
        return random_array(self.device, size, scale=math.sqrt(3 / columns))

    def vector(self, name, *shape):
        self.read(name, shape)
        return self.device.from_host(np.ones(shape, np.float32))


def layer_shapes(size, prefix, inputs):
    """Return the shapes of a decoder layer's tensors; `inputs` are the inputs of the attention."""
    hidden, inner, dim = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * dim, size["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def write_checkpoint(folder, config, shapes):
    """Write a checkpoint of zeros, with the tokenizer of the demo model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(demo_model()[0] / "tokenizer.json", folder)
    header = {}
    begin = 0
    for name, shape in shapes.items():
        dtype, nbytes = ("I32", 4) if name == "d2t" else ("BF16", 2)
        end = begin + math.prod(shape) * nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)


def write_checkpoints(size, folder):
    """Write a Llama and its EAGLE-3 head, and return their folders."""
    hidden, vocab, layers = size["hidden_size"], size["vocab_size"], size["num_hidden_layers"]
    config = size | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": MAX_LENGTH,
        "eos_token_id": 3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    shapes = {name: (vocab, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes["model.norm.weight"] = (hidden,)
    for i in range(layers):
        shapes |= layer_shapes(size, f"model.layers.{i}", hidden)
    write_checkpoint(folder / "target", config, shapes)
    draft_vocab = min(32000, vocab // 2)
    taps = [0, 1, 2] if layers < 8 else [2, layers // 2, layers - 3]
    head_config = config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps},
    }
    head_shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        "d2t": (draft_vocab,),
        **layer_shapes(size, "midlayer", 2 * hidden),
    }
    write_checkpoint(folder / "head", head_config, head_shapes)
    return folder / "target", folder / "head"


@contextmanager
def random_checkpoints(size):
    """Yield the folders of a Llama and an EAGLE-3 head, which load with random weights."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(llama, "Weights", RandomWeights),
        mock.patch.object(eagle3, "Weights", RandomWeights),
    ):
        yield write_checkpoints(size, Path(folder))


def random_kv(device, size, length, slots=BATCH, layers=None):
    """Return a KV cache with pages for `length` positions of each slot."""
    return PagedKV(
        device,
        layers=layers or size["num_hidden_layers"],
        pages=slots * length // PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=size["num_key_value_heads"],
        head_dim=size["head_dim"],
        dtype="bfloat16",
        slots=slots,
        max_pages_per_slot=length // PAGE_SIZE,
    )


def random_llama(device, size):
    """Return a Llama with random weights and a KV cache for `BATCH` slots."""
    with random_checkpoints(size) as (target, _):
        config = LlamaConfig.from_dir(target)
        kv = random_kv(device, size, MAX_LENGTH)
        return LlamaModel(device, config, Checkpoint(target), kv, max_rows=256)


@contextmanager
def random_engine(size, drafts, programmatic):
    """Open an engine whose EAGLE-3 head proposes `drafts` drafts per round; 0 for no drafter."""
    with (
        random_checkpoints(size) as (target, head),
        Engine(
            target,
            head if drafts else None,
            max_batch_size=BATCH,
            max_length=MAX_LENGTH,
            draft_length=drafts or 1,
            timeline=True,
            internal=InternalOptions(programmatic=programmatic),
        ) as engine,
    ):
        yield engine


def context_rows(device, length, count):
    """Return `count` rows at the end of contexts, at most four per slot unless there are many."""
    per_slot = max(4, count // BATCH)
    index = np.arange(count)
    slots = index // per_slot
    positions = length - min(count, per_slot) + index % per_slot
    rows = make_rows(device, [5] * count, slots, positions)
    return replace(rows, rows_per_slot=min(count, per_slot))
