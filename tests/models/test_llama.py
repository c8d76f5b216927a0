"""Llama: logits of Hugging Face transformers and of NumPy, features, refusals."""

from dataclasses import replace

import nets_util as nets
import numpy as np
import numpy_llama
import pytest
from tiny_models import edit_tensors, llama_config, make_tiny_llama

from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import StreamLane
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel

CASES = sorted(p.parent.name for p in nets.FIXTURES.glob("*/generation_config.json"))


def test_the_fixtures_are_there():
    """Every attention layout, rotary kind and dtype has its fixture."""
    configs = [LlamaConfig.from_dir(nets.FIXTURES / case) for case in CASES]
    assert {c.rope.kind for c in configs} == {"default", "linear", "llama3"}
    assert {c.dtype for c in configs} == {"float32", "float16", "bfloat16"}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    groups = {c.num_attention_heads // c.num_key_value_heads for c in configs}
    assert groups >= {1, 2, 3, 4}


@pytest.mark.parametrize("form", nets.FORMS)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(device, stream, case, form):
    """A prompt in two chunks gives the logits of Hugging Face transformers at every position."""
    expected = np.load(nets.FIXTURES / case / "expected.npz")
    model = nets.load_llama(device, nets.FIXTURES / case, form=form, dtype="float32")
    nets.own(stream, model.kv, 1, 40)
    tokens = expected["tokens"]
    first = nets.forward(stream, model, tokens[:23], 1, np.arange(23))
    second = nets.forward(stream, model, tokens[23:], 1, np.arange(23, 40))
    logits = np.concatenate([first, second])
    np.testing.assert_allclose(logits, expected["logits"], atol=3e-5)


def test_rounded_activations_are_nearer_to_float32_than_transformers_in_bfloat16(device, stream):
    """On tensor cores logits, at once or in chunks, are off those of whole activations by less than
    transformers in bfloat16 is; where activations are whole too by a hundredth of it."""
    expected = np.load(nets.FIXTURES / "tensor_cores/bfloat16/expected.npz")
    exact = expected["logits"]
    error = {}
    for activations in ("rounded", "float32"):
        model = nets.load_llama(
            device,
            nets.FIXTURES / "tensor_cores/bfloat16",
            form="warp",
            activations=activations,
            dtype="float32",
        )
        nets.own(stream, model.kv, 1, 40)
        nets.own(stream, model.kv, 2, 40)
        logits = nets.forward(stream, model, expected["tokens"], 1, np.arange(40))
        for part in np.split(np.arange(40), (1, 5, 21)):
            again = nets.forward(stream, model, expected["tokens"][part], 2, part)
            assert nets.same_bits(again, logits[part])
        error[activations] = np.sqrt(np.mean((logits - exact) ** 2))
    theirs = np.sqrt(np.mean((expected["rounded"] - exact) ** 2))
    assert 0.01 * theirs < error["rounded"] < theirs
    assert error["float32"] < 0.01 * theirs


def test_the_last_layers_output_can_be_a_feature(device, stream, tmp_path):
    """Id n-1 is the residual stream after the last layer, before the final norm; asking for
    features leaves every logit bit as it is."""
    weights = make_tiny_llama(tmp_path)
    model = nets.load_llama(device, tmp_path)
    nets.own(stream, model.kv, 0, 9)
    model.set_feature_layers((0, 1, 2))
    features = device.zeros((9, 3 * 48), "float32")
    tokens = np.arange(9) * 7
    plain = nets.forward(stream, model, tokens, 0, np.arange(9))
    assert nets.same_bits(plain, nets.forward(stream, model, tokens, 0, np.arange(9), features))
    streams = numpy_llama.llama_streams(weights, llama_config(), tokens)
    np.testing.assert_allclose(features.to_host(), np.concatenate(streams, axis=-1), atol=2e-5)


def test_cache_dtype_is_a_choice(device, stream, tmp_path):
    """A coarser cache than the weights moves logits a little, and only a little."""
    weights = make_tiny_llama(tmp_path)
    wanted = numpy_llama.llama_logits(weights, llama_config(), np.arange(20))
    error = {}
    for dtype in ("float32", "float16", "bfloat16"):
        model = nets.load_llama(device, tmp_path, dtype=dtype)
        nets.own(stream, model.kv, 0, 20)
        error[dtype] = np.abs(nets.forward(stream, model, range(20), 0, range(20)) - wanted).max()
    assert error["float32"] < 1e-4 < error["bfloat16"] < 0.5
    assert error["float32"] < error["float16"] < error["bfloat16"]


def _set(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "up_proj"),
        (_set("model.norm.weight", np.ones(47, np.float32)), r"\[47\], expected \[48\]"),
        (_set("model.layers.1.self_attn.k_proj.weight", np.ones((48, 48), np.float32)), "k_proj"),
        (_set("model.embed_tokens.weight", np.ones((300, 48), np.float32)), r"\[300, 48\]"),
        (_set("model.norm.weight", np.ones(48, np.int64)), "dtype int64"),
        (_set("model.layers.0.self_attn.q_proj.bias", np.ones(48, np.float32)), r"q_proj\.bias"),
        (_set("model.layers.3.input_layernorm.weight", np.ones(48, np.float32)), r"layers\.3"),
        (
            _set("model.layers.0.self_attn.k_proj.weight", np.ones((16, 48), np.float16)),
            r"k_proj\.weight is float16",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(device, tmp_path, change, words):
    """Missing, misshapen, mistyped and leftover tensors raise by name; so do matrices that act
    together without sharing a dtype."""
    make_tiny_llama(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        nets.load_llama(device, tmp_path)


def test_an_untied_model_needs_its_head(device, stream, tmp_path):
    """tie_word_embeddings decides: untied without lm_head is refused, tied ignores one."""
    make_tiny_llama(tmp_path / "a", tie_word_embeddings=False)
    edit_tensors(tmp_path / "a", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        nets.load_llama(device, tmp_path / "a")
    make_tiny_llama(tmp_path / "b")
    logits = []
    for _ in range(2):
        model = nets.load_llama(device, tmp_path / "b")
        nets.own(stream, model.kv, 0, 4)
        logits.append(nets.forward(stream, model, range(4), 0, range(4)))
        edit_tensors(tmp_path / "b", _set("lm_head.weight", np.ones((320, 48), np.float32)))
    assert nets.same_bits(*logits)


def test_forwards_that_cannot_work_are_refused(device, stream, tmp_path):
    """Wrong caches, too many rows, unset or malformed feature layers raise before any work."""
    make_tiny_llama(tmp_path)
    config = LlamaConfig.from_dir(tmp_path)
    kv = nets.make_cache(device, config, 2)
    with pytest.raises(ShapeError, match="kv_heads"):
        LlamaModel(device, config, Checkpoint(tmp_path), kv, max_rows=4)
    model = nets.load_llama(device, tmp_path, max_rows=4)
    lane = StreamLane(stream)
    with pytest.raises(ShapeError, match="max_rows=4"):
        model.forward(lane, nets.make_rows(device, range(5), 0, range(5)))
    rows = nets.make_rows(device, range(4), 0, range(4))
    with pytest.raises(ShapeError, match="slot"):
        model.forward(lane, replace(rows, slot=rows.slot[1:]))
    features = device.zeros((4, 3 * 48), "float32")
    with pytest.raises(OptionError, match="set_feature_layers"):
        model.forward(lane, rows, features)
    for ids in ((0, 1, 3), (0, 0, 1), (-1, 0, 1)):
        with pytest.raises(OptionError, match="feature layers"):
            model.set_feature_layers(ids)
    model.set_feature_layers((0, 1, 2))
    with pytest.raises(ShapeError, match="width=144"):
        model.forward(lane, rows, device.zeros((4, 48), "float32"))
