"""Tests of `Checkpoint`, which rejects damaged files when it opens them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import make_tiny_llama

from graft.cudagraph.driver.dtypes import to_float32
from graft.models.errors import CheckpointError
from graft.models.llm.checkpoint import Checkpoint


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoint_returns_tensors_exactly(tmp_path, dtype, shards):
    """Tensors of every dtype are read back unchanged from a single file and from three shards."""
    written = make_tiny_llama(tmp_path, dtype=dtype, shards=shards)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == tuple(sorted(written))
    for name, wanted in written.items():
        array, kind = checkpoint.get(name, wanted.shape)
        assert kind == dtype
        np.testing.assert_array_equal(to_float32(array, kind), wanted)


def test_checkpoint_index_takes_precedence_over_single_file(tmp_path):
    """A model.safetensors in a folder with an index is read only if the index lists it."""
    written = make_tiny_llama(tmp_path, shards=3)
    stray = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": np.zeros(48, np.float32)}, stray)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == tuple(sorted(written))
    norm, _ = checkpoint.get("model.norm.weight", (48,))
    np.testing.assert_array_equal(norm, written["model.norm.weight"])
    index = {"weight_map": {"model.norm.weight": stray.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(tmp_path).names == ("model.norm.weight",)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not valid JSON"):
        Checkpoint(tmp_path)


def test_checkpoint_rejects_wrong_name_shape_or_dtype(tmp_path):
    """Errors name the tensor. int64 and bool tensors are returned only if `dtypes` allows them."""
    make_tiny_llama(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[48\], expected \[49\]"):
        checkpoint.get("model.norm.weight", (49,))
    with pytest.raises(CheckpointError, match="nothing is missing"):
        checkpoint.get("nothing")
    save_file({"w": np.zeros(4)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="w has dtype F64"):
        Checkpoint(tmp_path / "x.safetensors").get("w")
    save_file({"d2t": np.arange(5), "t2d": np.array([True, False])}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(checkpoint.get("d2t", (5,), ("int64",))[0], np.arange(5))
    np.testing.assert_array_equal(checkpoint.get("t2d", (2,), ("uint8",))[0], [1, 0])
    with pytest.raises(CheckpointError, match="d2t has dtype int64, expected float32"):
        checkpoint.get("d2t")


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda data, kept=kept: data[:kept] for kept in (0, 4, 8, 100, -1, -1000)),
        *(
            lambda data, new=new: new
            for new in (b"\x80\x04\x95", b"\xff" * 8, b"PK\x03\x04" + b"\0" * 60)
        ),
        lambda data: data + b"x",
    ],
)
def test_checkpoint_rejects_damaged_files(tmp_path, spoil):
    """Truncated files, pickles, zip files and files with trailing bytes raise an error."""
    make_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: [h],
        lambda h: {**h, "a": {"dtype": "F32"}},
        lambda h: {**h, "b": h["a"]},
        lambda h: {"a": h["a"]},
        *(
            lambda h, field=field: {**h, "a": {**h["a"], **field}}
            for field in (
                {"dtype": ["F32"]},
                {"shape": [10**4000]},
                {"shape": [-2, -2]},
                {"shape": [2, 3]},
                {"shape": [True, 4]},
                {"dtype": "F16"},
                {"data_offsets": [16, 0]},
                {"data_offsets": [0, 1 << 60]},
                {"data_offsets": [0, 20]},
            )
        ),
    ],
)
def test_checkpoint_rejects_inconsistent_headers(tmp_path, change):
    """A header whose shapes, dtypes, offsets and file size do not agree raises an error."""
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)}, file)
    Checkpoint(tmp_path)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    assert header["a"]["data_offsets"] == [0, 16]
    text = json.dumps(change(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)


def test_checkpoint_rejects_missing_shards_and_tensors(tmp_path):
    """If the index names a tensor or a shard that does not exist, the error names it."""
    make_tiny_llama(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    extra = {**whole["weight_map"], "model.extra": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": extra}))
    with pytest.raises(CheckpointError, match=r"model\.extra"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps(whole))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": ' * 99999,
        *(
            json.dumps({"weight_map": {"a": file}})
            for file in (
                "x" * 5000,
                "x\0",
                "../model.safetensors",
                "/etc/passwd",
                "a/b.safetensors",
            )
        ),
    ],
    ids=lambda text: text[:40],
)
def test_checkpoint_rejects_broken_shard_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint(tmp_path)


def test_checkpoint_rejects_pickled_weights_with_conversion_hint(tmp_path):
    """A folder without safetensors files raises an error that says how to convert .bin files."""
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="save_file"):
        Checkpoint(tmp_path)
