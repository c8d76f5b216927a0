"""Tests that compare target models with Hugging Face transformers and NumPy."""

import json
from dataclasses import replace

import model_util
import numpy as np
import numpy_llama
import pytest
from tiny_models import QWEN2, SMOLLM3, edit_tensors, llama_config, make_tiny_llama, write_json

from graft.cudagraph.errors import OptionError, ShapeError
from graft.cudagraph.lanes import StreamLane
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import TARGETS, LlamaConfig
from graft.models.llm.llama import LlamaModel

CASES = sorted(p.parent.name for p in model_util.FIXTURES.glob("*/generation_config.json"))


def test_llama_fixtures_cover_all_layouts():
    """The model fixtures together cover every attention layout, RoPE kind and dtype."""
    configs = [LlamaConfig.from_dir(model_util.FIXTURES / case) for case in CASES]
    assert {c.rope.kind for c in configs} == {"default", "linear", "llama3", "yarn"}
    assert {c.dtype for c in configs} == {"float32", "float16", "bfloat16"}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    groups = {c.num_attention_heads // c.num_key_value_heads for c in configs}
    assert groups >= {1, 2, 3, 4}
    names = set()
    for case in CASES:
        data = json.loads((model_util.FIXTURES / case / "config.json").read_text())
        names.update(data["architectures"])
    assert names == set(TARGETS)


@pytest.mark.parametrize("form", model_util.FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.full("eight_layers_bfloat16-warp", "single_key_linear_float16-warp")
def test_llama_logits_equal_transformers(device, stream, case, form):
    """Logits of a prompt in two chunks equal those of transformers at every position."""
    expected = np.load(model_util.FIXTURES / case / "expected.npz")
    model = model_util.load_llama(device, model_util.FIXTURES / case, form=form, dtype="float32")
    model_util.allocate_pages(stream, model.kv, 1, 40)
    tokens = expected["tokens"]
    first = model_util.forward(stream, model, tokens[:23], 1, np.arange(23))
    second = model_util.forward(stream, model, tokens[23:], 1, np.arange(23, 40))
    logits = np.concatenate([first, second])
    np.testing.assert_allclose(logits, expected["logits"], atol=3e-5)


ROPE_SCALING = model_util.FIXTURES / "rope_scaling"


def rope_cases():
    """Return all cases in all forms. Forms after the first one read the same table of rotations.

    Except for one case, they carry the mark full.
    """
    found = []
    for number, case in enumerate(json.loads((ROPE_SCALING / "cases.json").read_text())):
        for form in model_util.FORMS:
            is_full = number > 0 and form != model_util.FORMS[0]
            found.append(pytest.param(case, form, marks=pytest.mark.full if is_full else ()))
    return found


@pytest.mark.parametrize(("case", "form"), rope_cases())
@pytest.mark.full("yarn-warp")
def test_rope_scaling_logits_and_greedy_tokens_equal_transformers(
    device, stream, tmp_path, case, form
):
    """Logits of a prompt in two chunks, and greedy tokens, equal those of transformers.

    If the scaling depends on the length of the sequence, only the logits at the maximum length are
    compared, because transformers computes the logits of shorter sequences with other frequencies.
    """
    folder, config = write_rope_case(tmp_path, case)
    expected = np.load(ROPE_SCALING / "expected.npz")
    model = model_util.load_llama(device, folder, form=form, dtype="float32", max_length=40)
    model_util.allocate_pages(stream, model.kv, 1, 40)
    tokens = np.load(config["base"] / "expected.npz")["tokens"]
    model_util.forward(stream, model, tokens[:23], 1, np.arange(23))
    logits = model_util.forward(stream, model, tokens[23:], 1, np.arange(23, 40))
    np.testing.assert_allclose(logits[-8:], expected[f"{case}_logits"], atol=3e-5)
    if case in ("dynamic", "longrope_long"):
        return
    greedy = list(expected[f"{case}_greedy"])
    model_util.allocate_pages(stream, model.kv, 2, 40)
    logits = model_util.forward(stream, model, greedy[:20], 2, np.arange(20))
    for position in range(20, 40):
        assert logits[-1].argmax() == greedy[position]
        logits = model_util.forward(stream, model, greedy[position : position + 1], 2, [position])


def write_rope_case(folder, case):
    """Write a model of `ROPE_SCALING`; return its folder and its case, with its base model."""
    entry = json.loads((ROPE_SCALING / "cases.json").read_text())[case]
    base = model_util.FIXTURES / entry["model"]
    data = json.loads((base / "config.json").read_text())
    write_json(folder / "config.json", data | entry["config"])
    (folder / "model.safetensors").symlink_to(base / "model.safetensors")
    return folder, entry | {"base": base}


def test_llama_rounded_activations_are_more_accurate_than_transformers_bfloat16(device, stream):
    """With tensor cores, the logits have a smaller error than those of transformers in bfloat16.

    With split activations, the error is below a hundredth of the error of transformers.
    """
    expected = np.load(model_util.FIXTURES / "tensor_cores/bfloat16/expected.npz")
    exact = expected["logits"]
    error = {}
    for activations in ("rounded", "float32"):
        model = model_util.load_llama(
            device,
            model_util.FIXTURES / "tensor_cores/bfloat16",
            form="warp",
            activations=activations,
            dtype="float32",
        )
        model_util.allocate_pages(stream, model.kv, 1, 40)
        logits = model_util.forward(stream, model, expected["tokens"], 1, np.arange(40))
        error[activations] = np.sqrt(np.mean((logits - exact) ** 2))
    theirs = np.sqrt(np.mean((expected["rounded"] - exact) ** 2))
    assert 0.01 * theirs < error["rounded"] < theirs
    assert error["float32"] < 0.01 * theirs


def test_llama_features_are_layer_outputs(device, stream, tmp_path):
    """The features are the residual streams after the selected layers, before the final norm.

    Copying features does not change the bits of the logits.
    """
    weights = make_tiny_llama(tmp_path)
    model = model_util.load_llama(device, tmp_path)
    model_util.allocate_pages(stream, model.kv, 0, 9)
    model.set_feature_layers((0, 1, 2))
    features = device.zeros((9, 3 * 48), "float32")
    tokens = np.arange(9) * 7
    plain = model_util.forward(stream, model, tokens, 0, np.arange(9))
    logits = model_util.forward(stream, model, tokens, 0, np.arange(9), features)
    assert model_util.same_bits(plain, logits)
    streams = numpy_llama.llama_streams(weights, llama_config(), tokens)
    np.testing.assert_allclose(features.to_host(), np.concatenate(streams, axis=-1), atol=2e-5)


def test_llama_kv_cache_dtype_bounds_error(device, stream, tmp_path):
    weights = make_tiny_llama(tmp_path)
    wanted = numpy_llama.llama_logits(weights, llama_config(), np.arange(20))
    error = {}
    for dtype in ("float32", "float16", "bfloat16"):
        model = model_util.load_llama(device, tmp_path, dtype=dtype)
        model_util.allocate_pages(stream, model.kv, 0, 20)
        logits = model_util.forward(stream, model, range(20), 0, range(20))
        error[dtype] = np.abs(logits - wanted).max()
    assert error["float32"] < 1e-4 < error["bfloat16"] < 0.5
    assert error["float32"] < error["float16"] < error["bfloat16"]


@pytest.mark.parametrize(
    ("architecture", "weights"),
    [
        pytest.param(QWEN2, "checkpoint", id="qwen2", marks=pytest.mark.full),
        pytest.param(QWEN2, "fp8", id="qwen2-fp8"),
        pytest.param(SMOLLM3, "checkpoint", id="smollm3"),
        pytest.param(SMOLLM3, "fp8", id="smollm3-fp8", marks=pytest.mark.full),
    ],
)
@pytest.mark.full("smollm3")
def test_tensor_cores_equal_other_form_in_every_architecture(
    device, stream, tmp_path, architecture, weights
):
    """Fused QKV products with biases, and layers without RoPE, equal those of the other form.

    In the warp form, the rows of the QKV matrix and its biases are interleaved.
    """
    if "thread" not in model_util.FORMS:
        pytest.skip("GPU code has only one form of kernels")
    make_tiny_llama(
        tmp_path,
        dtype="bfloat16",
        **architecture,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=4,
        head_dim=32,
    )
    logits = []
    for form in ("thread", "warp"):
        model = model_util.load_llama(
            device, tmp_path, form=form, activations="float32", weights=weights, dtype="float32"
        )
        model_util.allocate_pages(stream, model.kv, 0, 30)
        logits.append(model_util.forward(stream, model, np.arange(30), 0, np.arange(30)))
    kernels = model.kernels
    assert kernels.products.can_fuse_rope(32, "bfloat16", 256, 128)
    np.testing.assert_allclose(*logits, atol=2e-3)


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
def test_llama_rejects_unsuitable_checkpoints(device, tmp_path, change, words):
    """Checkpoints that do not match the model raise an error that names the tensor.

    The cases are missing and unused tensors, tensors of a wrong shape or dtype, and stacked
    matrices of different dtypes.
    """
    make_tiny_llama(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        model_util.load_llama(device, tmp_path)


def test_qwen2_requires_every_bias(device, tmp_path):
    make_tiny_llama(tmp_path, **QWEN2)
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.self_attn.v_proj.bias"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj\.bias is missing"):
        model_util.load_llama(device, tmp_path)


def test_llama_tied_embeddings_decide_lm_head(device, stream, tmp_path):
    """A model requires the tensor lm_head if embeddings are not tied, and otherwise ignores it."""
    make_tiny_llama(tmp_path / "a", tie_word_embeddings=False)
    edit_tensors(tmp_path / "a", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        model_util.load_llama(device, tmp_path / "a")
    make_tiny_llama(tmp_path / "b")
    logits = []
    for _ in range(2):
        model = model_util.load_llama(device, tmp_path / "b")
        model_util.allocate_pages(stream, model.kv, 0, 4)
        logits.append(model_util.forward(stream, model, range(4), 0, range(4)))
        edit_tensors(tmp_path / "b", _set("lm_head.weight", np.ones((320, 48), np.float32)))
    assert model_util.same_bits(*logits)


def test_llama_rejects_invalid_forward_arguments(device, stream, tmp_path):
    """A KV cache of a wrong shape, too many rows and invalid feature layers raise an error."""
    make_tiny_llama(tmp_path)
    config = LlamaConfig.from_dir(tmp_path)
    kv = model_util.make_cache(device, config, 2)
    with pytest.raises(ShapeError, match="kv_heads"):
        LlamaModel(device, config, Checkpoint(tmp_path), kv, max_rows=4)
    model = model_util.load_llama(device, tmp_path, max_rows=4)
    lane = StreamLane(stream)
    with pytest.raises(ShapeError, match="max_rows=4"):
        model.forward(lane, model_util.make_rows(device, range(5), 0, range(5)))
    rows = model_util.make_rows(device, range(4), 0, range(4))
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
