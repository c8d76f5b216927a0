"""Tests of FP8 (E4M3) weights: arithmetic, checkpoint layouts and quantisation at load time."""

import functools
from dataclasses import replace

import model_util
import numpy as np
import pytest
from engine_util import demo_engine, mixed_requests, skip_warm_up
from tiny_models import (
    llama_config,
    llama_tensors,
    make_tiny_llama,
    rounded,
    write_json,
    write_safetensors,
)

from graft.cudagraph.driver.dtypes import E4M3
from graft.cudagraph.errors import OptionError
from graft.cudagraph.kernels.ptx import soft_device_runs_ptx
from graft.cudagraph.lanes import StreamLane
from graft.models.engine.options import Options
from graft.models.errors import CheckpointError, ConfigError
from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.weights import ScaledMatrix

CODES = np.array([code for code in range(256) if code & 127 != 127], np.uint8)


def e4m3_value(code):
    """Return the value of an E4M3 code (Micikevicius et al., 2022)."""
    sign = -1 if code >= 128 else 1
    exponent = code >> 3 & 15
    mantissa = code % 8 / 8
    if exponent == 0:
        return sign * 2.0**-6 * mantissa
    return sign * 2.0 ** (exponent - 7) * (1 + mantissa)


VALUES = np.array([e4m3_value(code) for code in CODES.tolist()])
FORMS = [
    (model_util.FORMS[0], 48, 200, "rounded"),
    ("warp", 20, 100, "rounded"),
    pytest.param("warp", 144, 384, "rounded", marks=pytest.mark.full),
    ("warp", 16, 1152, "rounded"),
    pytest.param("warp", 144, 384, "float32", marks=pytest.mark.full),
]
LAYER = "model.layers.0.mlp.down_proj.weight"


def nearest(values):
    """Return the E4M3 code nearest to each value, and the even code of two equally near ones."""
    column = values.ravel()[:, None].astype(np.float64)
    off = np.abs(column - VALUES)
    is_nearest = off == off.min(1, keepdims=True)
    order = np.where(is_nearest, CODES % 2, 2).argmin(1)
    return CODES[order].reshape(values.shape)


@pytest.mark.parametrize(("form", "columns", "inner", "activations"), FORMS)
def test_fp8_linear_equals_bfloat16_linear(device, stream, form, columns, inner, activations):
    """With power-of-two scales, FP8 weights give the same bits as equal weights in bfloat16.

    The test runs products of 1 to 150 rows, with and without a residual. Scales that are not powers
    of two add one rounding.
    """
    kernels = ModelKernels(device, form, activations)
    lane = StreamLane(stream)
    rng = np.random.default_rng(1)
    at = rng.integers(0, len(CODES), (columns, inner))
    x = model_util.normal(rng, 150 if inner == 384 else 20, inner)
    powers = np.exp2(rng.integers(-12, 4, columns)).astype(np.float32)
    codes = device.from_host(CODES[at], E4M3)
    weight = ScaledMatrix(codes, device.from_host(powers))
    same = model_util.upload(device, VALUES[at] * powers[:, None], "bfloat16")

    def product(weight, rows, **more):
        out = model_util.upload(device, np.ones((len(rows), columns)))
        x_there = model_util.upload(device, rows, kernels.products.input_dtype(weight))
        kernels.products.linear(lane, x_there, weight, out, **more)
        return model_util.download(stream, out)

    assert kernels.products.input_dtype(weight) == kernels.products.input_dtype(same)
    whole = product(same, x)
    for rows in (1, 2, 4, 16, 20, 64, 150):
        part = x[-rows:]
        assert model_util.same_bits(product(weight, part), whole[-rows:].copy()), rows
    ones = model_util.upload(device, np.ones((len(x), columns)))
    assert model_util.same_bits(product(weight, x, residual=ones), product(same, x, residual=ones))
    scale = rng.uniform(1e-4, 2, columns).astype(np.float32)
    np.testing.assert_array_equal(
        product(ScaledMatrix(codes, device.from_host(scale)), x), product(codes, x) * scale
    )
    if columns > 16:  # a slice of rows of a weight can be used as a weight
        out = device.empty((2, columns - 16), "float32")
        kernels.products.linear(lane, model_util.upload(device, x[:2]), weight[16:], out)
        got = model_util.download(stream, out)
        np.testing.assert_array_equal(got, product(weight, x[:2])[:, 16:])


@pytest.mark.parametrize(("form", "inner"), [(model_util.FORMS[0], 8), ("warp", 8), ("warp", 128)])
def test_fp8_linear_uses_exact_value_of_every_code(device, stream, form, inner):
    """Products with the identity matrix return all 254 finite E4M3 codes exactly, in any column."""
    kernels = ModelKernels(device, form)
    out = device.empty((inner, 256), "float32")
    at = (np.arange(256)[:, None] + np.arange(inner)) % len(CODES)
    for rows in (inner, 8):
        eye = model_util.upload(device, np.eye(inner)[:rows])
        kernels.products.linear(
            StreamLane(stream), eye, device.from_host(CODES[at], E4M3), out[:rows]
        )
        np.testing.assert_array_equal(model_util.download(stream, out)[:rows], VALUES[at].T[:rows])


GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
    "group_size": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": GROUP,
            "output_activations": None,
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
#: By layout: quantization_config, function from the number of rows to the shape of the scales, and
#: whether inputs have scales.
LAYOUTS = {
    "channel": (COMPRESSED, lambda rows: (rows, 1), False),
    "rows": (STATIC, lambda rows: (rows,), False),
    "tensor": (STATIC, lambda rows: (), True),
    "one": (STATIC, lambda rows: (1,), True),
}
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@functools.cache
def quantised(layout):
    """Return the tensors of a random FP8 model, and those of an equal bfloat16 model."""
    _, scales, inputs = LAYOUTS[layout]
    rng = np.random.default_rng(5)
    tensors = llama_tensors(llama_config(**SHAPE), seed=0)
    plain = {name: rounded(tensor, "bfloat16") for name, tensor in tensors.items()}
    stored = dict(plain)
    for name in [name for name in plain if "_proj" in name]:
        rows = len(plain[name])
        scale = np.exp2(rng.integers(-9, -5, scales(rows)).astype(np.float32))
        by_row = np.broadcast_to(scale.reshape(-1, 1), (rows, 1))
        stored[name] = nearest(np.clip(plain[name] / by_row, -448, 448))
        values = VALUES[np.searchsorted(CODES, stored[name])]
        plain[name] = (values * by_row).astype(np.float32)
        stored[f"{name}_scale"] = np.asarray(scale)
        if inputs:
            stored[name.replace("weight", "input_scale")] = np.ones((), np.float32)
    return stored, plain


def write_quantised(folder, layout, change=dict):
    """Write a random FP8 model, and an equal bfloat16 model in its subfolder `plain`."""
    quantisation = LAYOUTS[layout][0]
    stored, plain = quantised(layout)
    for where, tensors, more in (
        (folder, change(stored), {"quantization_config": quantisation}),
        (folder / "plain", plain, {}),
    ):
        where.mkdir(exist_ok=True)
        write_json(where / "config.json", llama_config(**SHAPE, **more))
        write_safetensors(where / "model.safetensors", tensors, "bfloat16")


def logits(device, stream, folder, form="warp", **options):
    """Return the logits of a prompt of 20 tokens."""
    model = model_util.load_llama(device, folder, form=form, **options)
    model_util.allocate_pages(stream, model.kv, 0, 20)
    return model_util.forward(stream, model, np.arange(20), 0, np.arange(20))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.full if name in ("rows", "one") else ())
        for name in LAYOUTS
    ],
)
def test_fp8_checkpoint_layouts_equal_bfloat16_model(device, stream, tmp_path, layout):
    """A model with row scales or matrix scales gives the same bits as the equal bfloat16 model.

    Scales of quantised inputs, which the checkpoint also contains, are ignored. The layout does not
    depend on the form of the kernels, so only one layout runs with all forms.
    """
    write_quantised(tmp_path, layout)
    for form in model_util.FORMS if layout == "channel" else model_util.FORMS[:1]:
        got = logits(device, stream, tmp_path, form)
        wanted = logits(device, stream, tmp_path / "plain", form)
        assert model_util.same_bits(got, wanted)


def test_fp8_quantisation_rounds_rows_to_nearest(device, stream, tmp_path):
    """With weights="fp8", each row is scaled by its largest magnitude and rounded to E4M3.

    Rows of zeros stay zero.
    """
    shape = {**SHAPE, "torch_dtype": "float32"}
    plain = make_tiny_llama(tmp_path / "plain", **shape)
    stored = dict(plain)
    plain[LAYER][3] = stored[LAYER][3] = 0
    write_safetensors(tmp_path / "plain/model.safetensors", plain, "float32")
    for name in [name for name in plain if "_proj" in name]:
        largest = np.abs(plain[name]).max(1, keepdims=True)
        scale = np.where(largest > 0, largest / np.float32(448), np.float32(1))
        codes = np.searchsorted(CODES, nearest(plain[name] / scale))
        stored[name] = (VALUES[codes] * scale).astype(np.float32)
    write_json(tmp_path / "config.json", llama_config(**shape))
    write_safetensors(tmp_path / "model.safetensors", stored, "float32")
    form = model_util.FORMS[0]
    # By default, products on tensor cores would round the activations to bfloat16.
    options = {"weights": "fp8", "activations": "float32"}
    got = logits(device, stream, tmp_path / "plain", form, **options)
    wanted = logits(device, stream, tmp_path, form)
    np.testing.assert_allclose(got, wanted, atol=2e-4)
    unquantised = logits(device, stream, tmp_path / "plain", form)
    assert np.abs(got - unquantised).max() > 0.01


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {**t, LAYER: t[LAYER] | 0x7F}, f"{LAYER} contains NaN"),
        (
            lambda t: {n: a for n, a in t.items() if n != f"{LAYER}_scale"},
            f"{LAYER}_scale is missing",
        ),
        (
            lambda t: {**t, f"{LAYER}_scale": np.ones((2, 1), np.float32)},
            r"_scale has shape \[2, 1\]",
        ),
        (lambda t: {**t, f"{LAYER}_scale": np.full(1, np.inf, np.float32)}, "non-finite scales"),
        (
            lambda t: {**t, "lm_head.weight": t[LAYER][:, :128]},
            "lm_head.weight has dtype float8_e4m3",
        ),
        (lambda t: {**t, "model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}, "k_scale"),
    ],
)
def test_fp8_rejects_invalid_tensors(device, tmp_path, change, words):
    """Invalid FP8 tensors raise an error that names the tensor.

    The cases are NaN, scales that are missing, of a wrong shape or not finite, an LM head in FP8,
    and scales for a KV cache.
    """
    write_quantised(tmp_path, "channel", change)
    with pytest.raises(CheckpointError, match=words):
        model_util.load_llama(device, tmp_path)


def changed(config, path, value):
    """Return a copy of a config with one (nested) field changed."""
    first, *rest = path
    return {**config, first: changed(config.get(first, {}), rest, value) if rest else value}


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        (COMPRESSED, ("quant_method",), "awq"),
        (COMPRESSED, ("quant_method",), None),
        (COMPRESSED, ("quant_method",), ["fp8"]),
        (COMPRESSED, ("format",), "int-quantized"),
        (COMPRESSED, ("kv_cache_scheme",), {"num_bits": 8}),
        (COMPRESSED, ("bits",), 8),
        (COMPRESSED, ("sparsity_config",), {"format": "sparse-24-bitmask"}),
        (COMPRESSED, ("transform_config",), {"config_groups": {}}),
        (COMPRESSED, ("config_groups", "group_0", "format"), "nvfp4-pack-quantized"),
        (COMPRESSED, ("config_groups", "group_0", "output_activations"), GROUP),
        (COMPRESSED, ("config_groups", "group_0"), [8]),
        (COMPRESSED, WEIGHTS, "fp8"),
        *(
            (COMPRESSED, (*WEIGHTS, name), value)
            for name, value in (
                ("num_bits", 4),
                ("type", "int"),
                ("strategy", "group"),
                ("strategy", "block"),
                ("symmetric", False),
                ("dynamic", True),
                ("group_size", 128),
                ("actorder", "static"),
                ("block_structure", [128, 128]),
            )
        ),
        (STATIC, ("fmt",), "e5m2"),
        (STATIC, ("activation_scheme",), "group"),
        (STATIC, ("weight_block_size",), [128, 128]),
        (STATIC, ("kv_cache_scheme",), "static"),
    ],
)
def test_fp8_config_rejects_other_quantisations(config, path, value):
    """If a config field requests another quantisation scheme, the error names the field."""
    LlamaConfig.from_dict(llama_config(quantization_config=config))
    refused = llama_config(quantization_config=changed(config, path, value))
    with pytest.raises(ConfigError, match=path[-1]):
        LlamaConfig.from_dict(refused)


def test_fp8_engine_output_is_unchanged_by_speculation(monkeypatch):
    """The greedy outputs of the quantised demo model do not change with speculation."""
    skip_warm_up(monkeypatch)
    requests = [replace(r, id=str(i)) for i, r in enumerate(mixed_requests(4, seed=3))]
    if soft_device_runs_ptx():
        requests = [replace(request, max_tokens=20) for request in requests]
    texts = []
    for speculation in (False, True):
        with demo_engine(speculation=speculation, weights="fp8", max_batch_size=4) as engine:
            outputs = engine.generate(requests)
            texts.append([(output.reason, output.tokens) for output in outputs])
    assert texts[0] == texts[1] and all(tokens for _, tokens in texts[0])
    with pytest.raises(OptionError, match="weights"):
        Options(weights="int8")
