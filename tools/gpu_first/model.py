"""Models and engines with random weights that are generated on the device.

The checkpoint is a sparse file, so that a model of full size needs neither a download nor space on
disk. The tokenizer of a full-size model is generated as well and has as many tokens as the model's
vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import string
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from graft.cudagraph.driver.memory import DeviceArray
from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.matcher import CompiledGrammar, Matcher
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.models.cache.kv import PagedKV
from graft.models.drafters import eagle3
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.models.llm import llama
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.weights import Weights
from graft.models.request import Request
from graft.tools.demo_model import demo_model
from graft.tools.gpu_first.session import SMALL_SHAPE, fill_random

BATCH_SIZE = 8
#: Maximum length of a request, and length of the prompt of the prefill measurement.
MAX_LENGTH = 4096
PREFILL_LENGTH = 2048
PAGE_SIZE = 16
#: Maximum size of the drafter's vocabulary.
MAX_DRAFT_VOCAB = 32000
Shapes = dict[str, tuple[int, ...]]


class RandomWeights(Weights):
    """Weights loader that checks names and shapes of a checkpoint, but returns random values."""

    def matrix(self, name: str, rows: int, columns: int) -> DeviceArray:
        """Return a random matrix, scaled so that outputs of its product are as large as inputs."""
        return self.stacked({name: rows}, columns)

    def stacked(
        self, parts: dict[str, int], columns: int, *args: Any, bias: bool = False
    ) -> DeviceArray:
        """Return one random matrix in place of the matrices `parts`, whose rows an engine stacks.

        Options for the order of the rows are ignored, because the rows are random.
        """
        assert not bias, "the measured models are Llamas, which have no biases"
        for name, rows in parts.items():
            self.read(name, (rows, columns))
        array = self.device.empty((sum(parts.values()), columns), "bfloat16")
        fill_random(self.device, array, math.sqrt(3 / columns))
        return array

    def vector(self, name: str, *shape: int) -> DeviceArray:
        """Return an array of ones."""
        self.read(name, shape)
        return self.device.from_host(np.ones(shape, np.float32))


# Checkpoints --------------------------------------------------------------------------------------


def layer_shapes(shape: dict[str, int], prefix: str, attention_inputs: int) -> Shapes:
    """Return the shapes of the tensors of a decoder layer by name.

    The names begin with `prefix`. `attention_inputs` is the number of input features of the query,
    key and value projections.
    """
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, attention_inputs),
        "self_attn.k_proj": (keys, attention_inputs),
        "self_attn.v_proj": (keys, attention_inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}.{name}.weight": size for name, size in shapes.items()}


def target_shapes(shape: dict[str, int]) -> Shapes:
    """Return the shapes of the target's tensors by name."""
    hidden = shape["hidden_size"]
    vocab = shape["vocab_size"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(shape["num_hidden_layers"]):
        shapes |= layer_shapes(shape, f"model.layers.{i}", hidden)
    return shapes


def head_shapes(shape: dict[str, int], draft_vocab: int) -> Shapes:
    """Return the shapes of the tensors of an EAGLE-3 head by name."""
    hidden = shape["hidden_size"]
    return {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        "d2t": (draft_vocab,),
        **layer_shapes(shape, "midlayer", 2 * hidden),
    }


def write_checkpoint(folder: Path, config: dict[str, Any], shapes: Shapes) -> None:
    """Write a checkpoint of zeros as a sparse file, which takes no space on disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    demo_tokenizer = demo_model()[0] / "tokenizer.json"
    if config["vocab_size"] == SMALL_SHAPE["vocab_size"]:
        shutil.copy(demo_tokenizer, folder)
    else:
        tokenizer = make_tokenizer(json.loads(demo_tokenizer.read_text()), config["vocab_size"])
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    header: dict[str, Any] = {}
    begin = 0
    for name, size in shapes.items():
        dtype, nbytes = ("I32", 4) if name == "d2t" else ("BF16", 2)
        end = begin + math.prod(size) * nbytes
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)


def make_tokenizer(demo: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the content of a tokenizer.json with `vocab_size` tokens.

    The tokenizer contains the tokens of the demo model's tokenizer and words of random letters. A
    word of n letters is merged from a word of n - 1 letters and one letter.
    """
    model = demo["model"]
    vocab = dict(model["vocab"])
    merges = [tuple(pair) for pair in model["merges"]]
    words = list(string.ascii_lowercase)
    for prefix in words:  # grows while the loop runs
        for letter in string.ascii_lowercase:
            if len(vocab) >= vocab_size:
                break
            word = prefix + letter
            words.append(word)
            if word not in vocab:
                vocab[word] = len(vocab)
                merges.append((prefix, letter))
        if len(vocab) >= vocab_size:
            break
    return demo | {"model": model | {"vocab": vocab, "merges": merges}}


def llama_config(shape: dict[str, int]) -> dict[str, Any]:
    """Return the content of a config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": MAX_LENGTH,
        "eos_token_id": 3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **shape,
    }


def write_checkpoints(shape: dict[str, int], folder: Path) -> tuple[Path, Path]:
    """Write checkpoints of a Llama and its EAGLE-3 head, and return their folders."""
    config = llama_config(shape)
    draft_vocab = min(MAX_DRAFT_VOCAB, shape["vocab_size"] // 2)
    layers = shape["num_hidden_layers"]
    aux_layers = [0, 1, 2] if layers < 8 else [2, layers // 2, layers - 3]
    head_config = config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux_layers},
    }
    target = folder / "target"
    head = folder / "head"
    write_checkpoint(target, config, target_shapes(shape))
    write_checkpoint(head, head_config, head_shapes(shape, draft_vocab))
    return target, head


# Engine -------------------------------------------------------------------------------------------


def has_grammar_backend() -> bool:
    """Return whether a grammar backend is installed."""
    return importlib.util.find_spec("llguidance") is not None


class UnusedBackend:
    """Grammar backend for engines whose requests have no grammar. It compiles nothing.

    An engine requires a backend even if no request has a grammar.
    """

    name = "none"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, spec: Spec) -> CompiledGrammar:
        raise GrammarError("no grammar backend is installed")

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        raise GrammarError("no grammar backend is installed")


@contextmanager
def random_weights() -> Iterator[None]:
    """Give random weights to the models that are loaded in the block."""
    with (
        mock.patch.object(llama, "Weights", RandomWeights),
        mock.patch.object(eagle3, "Weights", RandomWeights),
    ):
        yield


def random_model(device: Any, shape: dict[str, int], form: str | None = None) -> LlamaModel:
    """Return a Llama with random weights and pages for `BATCH_SIZE` slots of maximum length."""
    with tempfile.TemporaryDirectory() as name, random_weights():
        folder = Path(name, "target")
        write_checkpoint(folder, llama_config(shape), target_shapes(shape))
        config = LlamaConfig.from_dir(folder)
        pages = MAX_LENGTH // PAGE_SIZE
        kv = PagedKV(
            device,
            layers=config.num_hidden_layers,
            pages=BATCH_SIZE * pages,
            page_size=PAGE_SIZE,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype="bfloat16",
            slots=BATCH_SIZE,
            max_pages_per_slot=pages,
        )
        return LlamaModel(device, config, Checkpoint(folder), kv, max_rows=256, form=form)


@contextmanager
def random_engine(shape: dict[str, int], drafts: int, programmatic: bool) -> Iterator[Engine]:
    """Open an engine with random weights, whose EAGLE-3 head proposes `drafts` drafts per round.

    If `drafts` is 0, the engine has no EAGLE-3 head and decodes without speculation. `programmatic`
    says whether the engine's graphs have programmatic edges.
    """
    backend: Any = "auto" if has_grammar_backend() else UnusedBackend
    with tempfile.TemporaryDirectory() as folder, random_weights():
        target, head = write_checkpoints(shape, Path(folder))
        with Engine(
            target,
            head if drafts else None,
            max_batch_size=BATCH_SIZE,
            max_length=MAX_LENGTH,
            draft_length=drafts or 1,
            grammar_backend=backend,
            timeline=True,
            internal=InternalOptions(programmatic=programmatic),
        ) as engine:
            yield engine


def round_parts(engine: Engine, batch: int, tokens: int, with_grammar: bool) -> dict[str, float]:
    """Return the mean milliseconds of a decoding round and of each of its parts by name.

    `engine` is an engine of `random_engine`, `batch` the number of requests, and `tokens` the
    number of tokens that each request generates.
    """
    grammar = GrammarSpec.regex("[a-z ]{400,}") if with_grammar else None
    requests = [
        Request(tokens=[5 + i] * 100, grammar=grammar, max_tokens=tokens) for i in range(batch)
    ]
    engine.generate(requests)  # warm-up
    engine.reset_stats()
    engine.generate(requests)
    stats = engine.stats
    parts = {"round": stats.round_ns, **stats.part_ns}
    return {part: ns / stats.rounds / 1e6 for part, ns in parts.items()}
