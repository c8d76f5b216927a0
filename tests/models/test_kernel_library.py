"""Tests that compare the model kernels, in both kernel forms, with NumPy at unaligned sizes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import numpy_llama
import pytest
from model_util import FORMS, download, make_rows, normal, same_bits, upload, upload_ints
from tiny_models import rounded

from graft.cudagraph.driver.dtypes import E4M3, to_float32
from graft.cudagraph.errors import GraftError, OptionError, ShapeError
from graft.cudagraph.kernels.kernels import Kernel
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.loader import SHARED_PERCENT
from graft.models.llm.kernels.operands import KVWrite, Norm
from graft.models.llm.kernels.tensor_cores import TALL_SHARED, mma_shape
from graft.models.llm.rope import Rope
from graft.models.llm.weights import ScaledMatrix

DTYPES = ("float32", "float16", "bfloat16")
NO_SOFT_DEVICE = SimpleNamespace(kind="cuda", runs_gpu_code=True)
CHOOSE_SPLITS = "graft.models.llm.kernels.tensor_cores._choose_splits"
CHOOSE_COLUMNS = "graft.models.llm.kernels.tensor_cores._choose_columns"
CHOOSE_BLOCK = "graft.models.llm.kernels.tensor_cores._choose_block"


@pytest.fixture(params=FORMS)
def kernels(device, request) -> ModelKernels:
    return ModelKernels(device, request.param)


@pytest.fixture
def lane(stream) -> StreamLane:
    return StreamLane(stream)


def run_linear(kernels, lane, x, w, **more) -> np.ndarray:
    """Run `Products.linear` and return the result on the host."""
    rows = x.out.shape[0] if isinstance(x, Norm) else x.shape[0]
    out = kernels.device.zeros((rows, w.shape[0]), "float32")
    kernels.products.linear(lane, x, w, out, **more)
    return download(lane.stream, out)


def test_model_kernels_request_equal_shares_of_shared_memory(device, lane, monkeypatch):
    """Kernels with different shares of shared memory could not run at the same time."""
    requests = {}
    monkeypatch.setattr(
        Kernel, "prefer_shared", lambda kernel, percent: requests.update({kernel.name: percent})
    )
    kernels = ModelKernels(device, "warp")
    for rows in (1, 20):
        x = device.zeros((rows, 128), "float32")
        run_linear(kernels, lane, x, device.zeros((16, 128), "bfloat16"))
        kernels.norms.rms_norm(lane, x, device.zeros((128,), "float32"), 1e-5, x)
    assert set(requests) == {"linear_few", "linear_many", "norm_rows"}
    assert set(requests.values()) == {SHARED_PERCENT}
    for rows in (20, 64, 256):
        shape = mma_shape(rows, 4096)
        blocks = shape.blocks_per_multiprocessor
        assert blocks * (shape.shared + 2048) <= 132 * 1024


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(1, 1, 1), (3, 5, 31), (4, 65, 64), (18, 20, 200), (9, 7, 520), (40, 16, 120), (40, 24, 128)],
)
def test_linear_equals_matrix_product(kernels, lane, dtype, rows, columns, inner):
    """`linear` is accurate for all weight dtypes and for sizes that cannot run on tensor cores."""
    rng = np.random.default_rng(rows * inner)
    x = normal(rng, rows, inner)
    w = rounded(normal(rng, columns, inner), dtype)
    out = run_linear(kernels, lane, upload(kernels.device, x), upload(kernels.device, w, dtype))
    wanted = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(out, wanted, atol=3e-6 * np.sqrt(inner) * 4)


@pytest.mark.parametrize(
    ("dtype", "activations", "columns", "inner"),
    [
        ("bfloat16", "rounded", 48, 128),
        ("float16", "float32", 32, 256),
        pytest.param("bfloat16", "float32", 144, 384, marks=pytest.mark.full),
        pytest.param("float16", "rounded", 16, 1152, marks=pytest.mark.full),
    ],
)
def test_tensor_core_linear_is_row_invariant(
    device, lane, monkeypatch, dtype, activations, columns, inner
):
    """A tensor-core product equals x W^T with rounded or split x, and is row invariant.

    The bits of an output row are the same alone, in small and large batches, in any tile, and with
    and without split K.
    """
    kernels = ModelKernels(device, "warp", activations)
    rng = np.random.default_rng(inner)
    x = normal(rng, 150, inner)
    if inner != 384:
        x = x[:32]
    w = rounded(normal(rng, columns, inner), dtype)
    w_device = upload(device, w, dtype)

    def check_rows(begin, end, dtype="float32"):
        """Multiply only rows [begin, end) of x and compare with these rows of the whole product."""
        out = run_linear(kernels, lane, upload(device, x[begin:end], dtype), w_device)
        assert same_bits(out, whole[begin:end].copy()), f"rows {begin} to {end}"

    whole = run_linear(kernels, lane, upload(device, x), w_device)
    if activations == "float32":
        seen = x
        precision = {"bfloat16": 2.0**-17, "float16": 2.0**-22}[dtype]
    else:
        seen = rounded(x, dtype)
        precision = 0
    wanted = seen.astype(np.float64) @ w.astype(np.float64).T
    tolerance = 12e-6 * np.sqrt(inner) * (1 + 1e5 * precision)
    np.testing.assert_allclose(whole, wanted, atol=tolerance)
    for splits in (1, 2, 4):
        monkeypatch.setattr(CHOOSE_SPLITS, lambda *_, splits=splits: splits)
        check_rows(0, 29)
    monkeypatch.undo()
    input_dtype = kernels.products.input_dtype(w_device)
    if input_dtype != "float32":
        check_rows(0, len(x), input_dtype)
        check_rows(0, 9, input_dtype)
    ranges = [(7, 8), (3, 5), (0, 4), (20, 28), (2, 11), (13, 29), (9, 26)]
    if inner == 384:
        ranges += [(1, 34), (80, 144), (20, 85)]
    for begin, end in ranges:
        check_rows(begin, end)


def tile_products(kernels, lane, epilogue, count) -> list[np.ndarray]:
    """Run products of `count` rows in bfloat16 with an epilogue and return their results."""
    device = kernels.device
    rng = np.random.default_rng(4)
    inner = {"norm": 1152, "gated": 128, "qkv": 256}[epilogue]
    x = upload(device, normal(rng, count, inner), "bfloat16")
    w = upload(device, normal(rng, 256 if epilogue == "qkv" else 144, inner), "bfloat16")
    stream = upload(device, normal(rng, count, w.shape[0]))
    if epilogue == "gated":
        out = device.zeros((count, 72), "bfloat16")
        kernels.products.gated_linear(lane, x, w, out)
        return [download(lane.stream, out)]
    if epilogue == "qkv":
        kv = make_kv(device, 1, 64, "bfloat16")
        assert kv.allocate(1, 32)
        kv.set_table(lane, 1)
        pos = [min(row, 40) for row in range(count)]  # positions after 31 are not allocated
        rows = make_rows(device, [0] * count, [1] * count, pos)
        rope_table = upload(device, Rope(theta=100.0).table(kv.positions, 64))
        kernels.attention.project_qkv(lane, x, w, stream, KVWrite(rope_table, rows, kv, 0, 2))
        return [download(lane.stream, stream), kv.k.to_host(), kv.v.to_host()]
    norm = Norm(
        upload(device, normal(rng, 144)),
        1e-5,
        device.zeros((count, 144), "bfloat16"),
        device.zeros((count, 9), "float32"),
    )
    kernels.products.linear(lane, x, w, stream, residual=stream, norm=norm)
    assert norm.square_sums is not None
    return [download(lane.stream, part) for part in (stream, norm.out, norm.square_sums)]


@pytest.mark.parametrize(
    ("epilogue", "splits"),
    [
        ("norm", 1),
        ("gated", 2),
        ("qkv", 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("norm", 2), ("gated", 1), ("qkv", 2))
        ),
    ],
)
@pytest.mark.full("norm-1")
def test_tall_tiles_give_bits_of_other_tiles(device, lane, monkeypatch, epilogue, splits):
    """Tiles of 256 rows give the bits of tiles of 128 rows, with each epilogue and split K."""
    kernels = ModelKernels(device, "warp")
    monkeypatch.setattr(CHOOSE_SPLITS, lambda *_: splits)
    results = []
    for block in (128, 256):
        monkeypatch.setattr(CHOOSE_BLOCK, lambda *_, block=block: block)
        results.append(tile_products(kernels, lane, epilogue, 140))
    assert {("ROW_BLOCK", 128), ("ROW_BLOCK", 256)} <= {
        i for key in kernels.loader.loaded for i in key
    }
    for expected, found in zip(*results, strict=True):
        assert same_bits(found, expected) and found.any()


@pytest.mark.parametrize(
    ("epilogue", "splits"),
    [("gated", 1), *(pytest.param(name, 2, marks=pytest.mark.full) for name in ("norm", "qkv"))],
)
def test_wide_tiles_give_bits_of_other_tiles(device, lane, monkeypatch, epilogue, splits):
    """Tiles of 256 columns give the bits of tiles of 128 columns."""
    kernels = ModelKernels(device, "warp")
    monkeypatch.setattr(CHOOSE_SPLITS, lambda *_: splits)
    results = []
    for outputs in (128, 256):
        monkeypatch.setattr(CHOOSE_COLUMNS, lambda _, outputs=outputs: outputs)
        results.append(tile_products(kernels, lane, epilogue, 61))
    assert {("OUTPUTS", 128), ("OUTPUTS", 256)} <= {i for key in kernels.loader.loaded for i in key}
    for expected, found in zip(*results, strict=True):
        assert same_bits(found, expected) and found.any()


@pytest.mark.parametrize(
    ("dtype", "splits"), [pytest.param("float16", 1, marks=pytest.mark.full), ("bfloat16", 2)]
)
def test_tall_tiles_equal_matrix_product_and_single_rows(device, lane, monkeypatch, dtype, splits):
    """Rows of tiles of 256 rows are accurate and have the bits of rows that run alone.

    The second tile has 14 rows. The two parts have two and three chunks.
    """
    kernels = ModelKernels(device, "warp")
    rng = np.random.default_rng(splits)
    x = rounded(normal(rng, 270, 640), dtype)
    w = rounded(normal(rng, 16, 640), dtype)
    weight = upload(device, w, dtype)
    monkeypatch.setattr(CHOOSE_SPLITS, lambda *_: splits)
    monkeypatch.setattr(CHOOSE_BLOCK, lambda *_: 256)
    whole = run_linear(kernels, lane, upload(device, x, dtype), weight)
    wanted = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(whole, wanted, atol=12e-6 * np.sqrt(640))
    for begin, end in ((0, 1), (127, 130), (250, 270)):
        part = run_linear(kernels, lane, upload(device, x[begin:end], dtype), weight)
        assert same_bits(part, whole[begin:end].copy())


def test_mma_shape_chooses_tall_tiles_only_where_they_fit_and_save_time():
    """An 8B Llama with 256 rows uses tall tiles for all matrices, a smaller one only for some."""
    blocks = {}
    for columns, inner in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        shape = mma_shape(256, columns, inner=inner, allow_tall=True)
        blocks[columns, inner] = shape.defines["ROW_BLOCK"], shape.grid
        assert mma_shape(256, columns, inner=inner).defines["ROW_BLOCK"] == 128
        assert mma_shape(128, columns, inner=inner, allow_tall=True).defines["ROW_BLOCK"] == 128
    assert blocks == {
        (6144, 4096): (256, (2, 1, 48)),
        (4096, 4096): (256, (4, 1, 32)),
        (28672, 4096): (256, (1, 1, 224)),
        (4096, 14336): (256, (4, 1, 32)),
    }


def test_mma_shape_chooses_wide_tiles_only_where_they_fit_and_save_time():
    """An 8B Llama with 64 rows uses wide tiles for the matrices that take two waves or more."""
    for columns, outputs in ((6144, 128), (4096, 128), (28672, 256), (128256, 256)):
        shape = mma_shape(64, columns, allow_tall=True)
        assert shape.defines == {"ROW_BLOCK": 64, "OUTPUTS": outputs}
        assert shape.shared <= TALL_SHARED
        assert mma_shape(64, columns).defines["OUTPUTS"] == 128
        assert mma_shape(32, columns, allow_tall=True).defines["OUTPUTS"] == 128


def test_linear_uses_no_tall_tiles_with_little_shared_memory(device, lane, monkeypatch):
    """A GPU with less than 227 KB of shared memory per block runs tiles of 128 rows."""
    monkeypatch.setattr(CHOOSE_BLOCK, lambda *_: 256)
    used = []
    for limit in (227 * 1024, 227 * 1024 - 1, 99 * 1024):
        with monkeypatch.context() as patch:
            patch.setattr(type(device), "attribute", lambda *_, limit=limit: limit)
            kernels = ModelKernels(device, "warp")
        x = device.zeros((140, 128), "bfloat16")
        run_linear(kernels, lane, x, device.zeros((16, 128), "bfloat16"))
        used += [item[1] for key in kernels.loader.loaded for item in key if item[0] == "ROW_BLOCK"]
    assert used == [256, 128, 128]


@pytest.mark.parametrize(("rows", "activations"), [(3, "rounded"), (20, "rounded"), (9, "float32")])
def test_gated_linear_equals_linear_and_silu_mul(device, lane, monkeypatch, rows, activations):
    """The fused gated product gives the same bits as `linear` followed by `silu_mul`.

    The cases have few and many rows and split K. The gate and up rows of the fused weight are
    interleaved in groups of eight.
    """
    kernels = ModelKernels(device, "warp", activations)
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256))
    w = rng.standard_normal((2, 24, 256)) / 4
    x_device = upload(device, x)
    out = device.zeros((rows, 24), "bfloat16")
    gate_up = run_linear(kernels, lane, x_device, upload(device, w.reshape(48, 256), "bfloat16"))
    kernels.elementwise.silu_mul(lane, upload(device, gate_up), out)
    wanted = download(lane.stream, out)
    blocks = [m.reshape(3, 8, 256) for m in w]
    interleaved = np.stack(blocks, 1).reshape(48, 256)
    gated = device.zeros((rows, 24), "bfloat16")
    kernels.products.gated_linear(lane, x_device, upload(device, interleaved, "bfloat16"), gated)
    assert same_bits(download(lane.stream, gated), wanted)
    monkeypatch.setattr(CHOOSE_SPLITS, lambda *_: 1)
    kernels.products.gated_linear(lane, x_device, upload(device, interleaved, "bfloat16"), gated)
    assert same_bits(download(lane.stream, gated), wanted)
    with pytest.raises(ShapeError, match="gated product without scratch requires"):
        kernels.products.gated_linear(
            lane, x_device, upload(device, w[0], "bfloat16"), device.zeros((rows, 12), "float32")
        )


@pytest.mark.parametrize(("activations", "count"), [("rounded", 150), ("float32", 40)])
def test_linear_with_folded_norm_equals_norm_between_products(
    device, lane, monkeypatch, activations, count
):
    """A folded norm equals a norm between two products, and the result is row invariant."""
    kernels = ModelKernels(device, "warp", activations)
    rng = np.random.default_rng(5)
    x = normal(rng, count, 256)
    start = normal(rng, count, 128)
    weight = 1 + 0.3 * normal(rng, 128)
    producer = upload(device, rng.standard_normal((128, 256)) / 8, "bfloat16")
    consumer = upload(device, rng.standard_normal((48, 128)) / 8, "bfloat16")

    def run(rows):
        own = x[rows]
        stream = upload(device, start[rows])
        norm = Norm(
            upload(device, weight),
            1e-5,
            device.zeros((len(own), 128), kernels.products.input_dtype(consumer)),
            device.zeros((len(own), 8), "float32"),
        )
        kernels.products.linear(
            lane, upload(device, own), producer, stream, residual=stream, norm=norm
        )
        return run_linear(kernels, lane, norm, consumer), stream.to_host()

    assert kernels.products.can_fold_norm(producer, consumer)
    whole, stream = run(slice(None))
    seen = rounded(stream * weight, "bfloat16" if activations == "rounded" else "float32")
    mean_square = np.mean(stream.astype(np.float64) ** 2, axis=-1, keepdims=True)
    root = np.sqrt(mean_square + 1e-5)
    consumer_values = to_float32(consumer.to_host(), "bfloat16").astype(np.float64)
    wanted = seen / root @ consumer_values.T
    np.testing.assert_allclose(whole, wanted, atol=5e-5)
    for begin, end in ((0, 1), (count - 1, count), (3, 12), (20, 37), (1, 66)):
        part, _ = run(slice(begin, end))
        assert same_bits(part, whole[begin:end].copy())
    monkeypatch.setattr(CHOOSE_SPLITS, lambda *_: 2)
    part, _ = run(slice(0, 40))
    assert same_bits(part, whole[:40].copy())


@pytest.mark.parametrize(
    ("dim", "activations", "dtype", "has_bias"),
    [
        pytest.param(64, "rounded", "bfloat16", False, marks=pytest.mark.full),
        (32, "float32", "float32", False),
        (64, "rounded", "bfloat16", True),
    ],
)
def test_fused_qkv_equals_linear_and_rope_and_store(
    device, lane, monkeypatch, dim, activations, dtype, has_bias
):
    """The fused QKV kernel gives the same bits as `linear` followed by `rope_and_store`.

    The cases have few and many rows, split K, padding, rows of a draft tree, and positions that are
    not allocated.
    """
    kernels = ModelKernels(device, "warp", activations)
    rng = np.random.default_rng(dim)
    w = normal(rng, 4 * dim, 128)
    blocks = w.reshape(4, 2, dim // 16, 8, 128)
    interleaved = blocks.swapaxes(1, 2).reshape(w.shape)
    bias = normal(rng, 4 * dim)
    interleaved_bias = bias.reshape(4, 2, dim // 16, 8).swapaxes(1, 2).reshape(-1)
    slots = [1, 0, 1, -1, 1, 2, 0, 1] + 12 * [0]
    pos = [17, 4, 18, 3, -1, 2, 1000, 29, *range(20, 32)]
    tree = np.array([0, 0, 5, *17 * [0]], np.uint64)
    found = []
    for splits, count in ((4, 8), (4, 20), (1, 20)):
        monkeypatch.setattr(CHOOSE_SPLITS, lambda *_, splits=splits: splits)
        x = upload(device, np.random.default_rng(3).standard_normal((20, 128))[:count])
        rows = replace(
            make_rows(device, [0] * count, slots[:count], pos[:count]),
            ancestors=device.from_host(tree[:count]),
        )
        for matrix in (w, interleaved):
            kv = make_kv(device, 1, dim, dtype)
            for slot, positions in ((1, 30), (0, 32)):
                assert kv.allocate(slot, positions)
                kv.set_table(lane, slot)
            rope_table = upload(device, Rope(theta=100.0).table(kv.positions, dim))
            qkv = device.zeros((count, 4 * dim), "float32")
            there = upload(device, matrix, "bfloat16")
            if has_bias:
                added = upload(device, bias if matrix is w else interleaved_bias)
                there = ScaledMatrix(there, bias=added)
            if matrix is w:
                kernels.products.linear(lane, x, there, qkv)
                kernels.attention.rope_and_store(lane, qkv, KVWrite(rope_table, rows, kv, 1, 2))
            else:
                kernels.attention.project_qkv(
                    lane, x, there, qkv, KVWrite(rope_table, rows, kv, 1, 2)
                )
            live = [r for r in range(count) if r not in (3, 4, 6)]
            queries = download(lane.stream, qkv)[live, : 2 * dim]
            found.append((queries, kv.k.to_host(), kv.v.to_host()))
        separate, fused = found[-2:]
        assert separate[1].any()
        assert all(map(same_bits, separate, fused))


def test_folded_norm_requires_tensor_cores(kernels, lane, device):
    """Norms cannot be folded into products with float16 or float32 weights."""
    half, whole = (device.zeros((16, 128), dtype) for dtype in ("float16", "float32"))
    assert not kernels.products.can_fold_norm(half, half) and not kernels.products.can_fold_norm(
        whole, whole
    )
    norm = Norm(
        device.zeros((128,), "float32"),
        1e-5,
        device.zeros((2, 128), "float32"),
        device.zeros((2, 8), "float32"),
    )
    out = device.zeros((2, 16), "float32")
    with pytest.raises(ShapeError, match="folded norm requires tensor cores"):
        kernels.products.linear(lane, norm, whole, out)
    with pytest.raises(ShapeError, match="folded norm requires tensor cores"):
        kernels.products.linear(lane, out, device.zeros((128, 16), "float32"), norm.out, norm=norm)


@pytest.mark.full("warp")
def test_linear_uses_exact_value_of_every_16_bit_weight(kernels, lane):
    """Every finite float16 and bfloat16 weight is multiplied exactly.

    Values below the smallest normal float32 may be flushed to zero.
    """
    for dtype in ("float16", "bfloat16"):
        bits = np.arange(1 << 16, dtype=np.uint16)
        if dtype == "float16":
            stored = bits.view(np.float16)
            exact = bits.view(np.float16).astype(np.float32)
        else:
            stored = bits
            exact = (bits.astype(np.uint32) << 16).view(np.float32)
        is_finite = np.isfinite(exact)
        is_normal = (np.abs(exact) >= 2.0**-126) | (exact == 0)
        checked = is_finite & is_normal
        stored[~is_finite] = 0
        for inner in (1, 8):
            w = kernels.device.from_host(stored.reshape(-1, inner), dtype)
            out = run_linear(kernels, lane, upload(kernels.device, np.eye(inner)), w).T.ravel()
            np.testing.assert_array_equal(out[checked], exact[checked])


@pytest.mark.parametrize(("rows", "inner"), [(5, 40), (5, 128), (20, 128), (20, 1024)])
def test_linear_adds_residual_in_place_and_copies_result(kernels, lane, rows, inner):
    """The residual and the output may be the same array. The copy has the same bits as the output.

    The other columns of the array that receives the copy do not change.
    """
    rng = np.random.default_rng(0)
    device = kernels.device
    x = rng.integers(-8, 9, (rows, inner)) / 8
    w = rng.integers(-8, 9, (16, inner)) / 8
    start = normal(rng, rows, 16)
    stream = upload(device, start)
    wide = upload(device, np.full((rows, 48), 7.0))
    x_device = upload(device, x)
    w_device = upload(device, w, "bfloat16")
    kernels.products.linear(lane, x_device, w_device, stream, residual=stream, copy_to=(wide, 16))
    out = download(lane.stream, stream)
    tapped = wide.to_host()
    np.testing.assert_allclose(out, start + x @ w.T, atol=2e-5)
    assert same_bits(tapped[:, 16:32].copy(), out)
    assert (tapped[:, :16] == 7).all()
    assert (tapped[:, 32:] == 7).all()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param(E4M3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(5, 21, 40), (5, 32, 128), (20, 48, 128), (20, 32, 1024)]
)
def test_linear_adds_bias_after_scale_and_before_residual(
    kernels, lane, rows, columns, inner, dtype
):
    rng = np.random.default_rng(rows)
    device = kernels.device
    x = upload(device, normal(rng, rows, inner))
    w = upload(device, rng.integers(-8, 9, (columns, inner)) / 8, dtype)
    scale = normal(rng, columns)
    bias = normal(rng, columns)
    residual = normal(rng, rows, columns)
    arrays = [upload(device, array) for array in (scale, bias)]
    scaled = run_linear(kernels, lane, x, ScaledMatrix(w, arrays[0]))
    got = run_linear(kernels, lane, x, ScaledMatrix(w, *arrays), residual=upload(device, residual))
    assert same_bits(got, scaled + bias + residual)
    got = run_linear(kernels, lane, x, ScaledMatrix(w, bias=arrays[1])[3:])
    assert same_bits(got, run_linear(kernels, lane, x, w[3:]) + bias[3:])


@pytest.mark.parametrize(
    ("columns", "inner"), [(21, 24), (21, 33), (21, 300), (16, 120), (24, 128)]
)
def test_linear_is_row_invariant(kernels, lane, columns, inner):
    """The result of a row has the same bits alone, among 2 to 18 rows and among 40 rows."""
    rng = np.random.default_rng(inner)
    device = kernels.device
    x = normal(rng, 40, inner)
    w = upload(device, rng.standard_normal((columns, inner)), "bfloat16")
    whole = run_linear(kernels, lane, upload(device, x), w)
    for rows in range(1, 19):
        for first in {0, 40 - rows, (40 - rows) // 2}:
            part = run_linear(kernels, lane, upload(device, x[first : first + rows]), w)
            assert same_bits(part, whole[first : first + rows].copy()), (rows, first)


@pytest.mark.parametrize("width", [1, 48, 100, 600])
def test_norm_equals_rms_norm(kernels, lane, width):
    rng = np.random.default_rng(width)
    x = normal(rng, 6, width) * 10
    x[2] = 0
    w = normal(rng, width)
    out = kernels.device.zeros((6, width), "float32")
    kernels.norms.rms_norm(lane, upload(kernels.device, x), upload(kernels.device, w), 1e-5, out)
    wanted = numpy_llama.rms_norm(x.astype(np.float64), w, 1e-5)
    np.testing.assert_allclose(download(lane.stream, out), wanted, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_copies_rows(kernels, lane, dtype):
    """`gather` copies rows of every dtype exactly and gives zeros for an index out of range."""
    table = rounded(normal(np.random.default_rng(1), 11, 70), dtype)
    table_on_device = upload(kernels.device, table, dtype)
    index = [3, 10, -1, 11, 0, 3]
    out = kernels.device.zeros((6, 70), "float32")
    kernels.elementwise.gather(lane, table_on_device, upload_ints(kernels.device, index), out)
    wanted = np.zeros((6, 70), np.float32)
    for row, i in enumerate(index):
        if 0 <= i < 11:
            wanted[row] = table[i]
    np.testing.assert_array_equal(download(lane.stream, out), wanted)


def test_silu_mul_is_accurate_for_all_gates(kernels, lane):
    """The relative error of `silu_mul` is at most 1e-6 for gates from -100 to 100.

    The result is finite for all gates.
    """
    g = np.linspace(-100, 100, 4001, dtype=np.float32)
    g = np.concatenate([g, np.array([-3e38, 3e38, 0.0], np.float32)])
    u = np.random.default_rng(3).standard_normal(g.size).astype(np.float32)
    u[-3:] = 0.5
    out = kernels.device.zeros((1, g.size), "float32")
    kernels.elementwise.silu_mul(lane, upload(kernels.device, np.concatenate([g, u])[None]), out)
    result = download(lane.stream, out)[0]
    g64 = g.astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = g64 / (1 + np.exp(-g64)) * u
    assert np.isfinite(result).all()
    # For gates below -87 the kernel clamps its exponent. The true value is then below 1e-35.
    np.testing.assert_allclose(result[:-3], wanted[:-3], rtol=1e-6, atol=2e-35)


def make_kv(device, kv_heads, dim, dtype="float32") -> PagedKV:
    return PagedKV(
        device,
        layers=2,
        pages=70,
        page_size=8,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        slots=3,
        max_pages_per_slot=30,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        pytest.param(*shape, dtype, marks=pytest.mark.full if i != j else ())
        for i, shape in enumerate([(4, 2, 8), (3, 1, 10), (2, 2, 64)])
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_rope_and_store_rotates_queries_and_writes_cache(
    kernels, lane, stream, dtype, heads, kv_heads, dim
):
    """`rope_and_store` rotates queries in place and writes keys and values to the KV cache.

    Cache entries of other layers and of positions that are not allocated do not change. Padding
    rows write nothing.
    """
    device = kernels.device
    rng = np.random.default_rng(dim)
    kv = make_kv(device, kv_heads, dim, dtype)
    for slot, positions in ((1, 20), (0, 5), (1, 30)):
        assert kv.allocate(slot, positions)
    kv.set_table(lane, 0)
    kv.set_table(lane, 1)
    slots = [1, 0, 1, -1, 1, 2, 0, 1]
    pos = [17, 4, 0, 3, -1, 2, 1000, 29]
    live = [0, 1, 2, 7]
    qkv = normal(rng, 8, heads + 2 * kv_heads, dim)
    rows = make_rows(device, [0] * 8, slots, pos)
    rope_table = upload(device, Rope(theta=100.0).table(kv.positions, dim))
    on_device = upload(device, qkv.reshape(8, -1))
    kernels.attention.rope_and_store(lane, on_device, KVWrite(rope_table, rows, kv, 1, heads))
    rotated = download(stream, on_device).reshape(qkv.shape)
    frequencies = numpy_llama.inverse_frequencies({"rope_theta": 100.0}, dim)
    wanted = numpy_llama.rotate(qkv.astype(np.float64), np.array(pos, float), frequencies)
    np.testing.assert_allclose(rotated[live, :heads], wanted[live, :heads], atol=1e-5)
    keys = np.zeros((2, 71, 8, kv_heads, dim))
    values = np.zeros((2, 71, 8, kv_heads, dim))
    first_value = heads + kv_heads
    for r in live:
        page = kv.pages_of(slots[r])[pos[r] // 8]
        inside = pos[r] % 8
        keys[1, page, inside] = wanted[r, heads:first_value]
        values[1, page, inside] = rounded(qkv[r, first_value:], dtype)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    stored_k, stored_v = (to_float32(cache.to_host(), dtype) for cache in (kv.k, kv.v))
    np.testing.assert_allclose(stored_k, keys, atol=tolerance)
    np.testing.assert_array_equal(stored_v, values.astype(np.float32))


def fill_cache(device, kv, slot, keys, values, layer=1) -> None:
    """Write keys and values [T, kv_heads, dim] of a slot to the cache arrays."""
    k = kv.k.to_host()
    v = kv.v.to_host()
    for t in range(keys.shape[0]):
        at = layer, kv.pages_of(slot)[t // kv.page_size], t % kv.page_size
        k[at], v[at] = keys[t], values[t]
    kv.k.copy_from(k)
    kv.v.copy_from(v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 1, 10), (2, 2, 80), (6, 2, 32)]
)
def test_attention_equals_causal_softmax(kernels, lane, stream, heads, kv_heads, dim):
    """Each row attends to positions 0..pos of its slot, and padding rows give zeros.

    The positions include the boundaries of tiles.
    """
    device = kernels.device
    rng = np.random.default_rng(dim)
    kv = make_kv(device, kv_heads, dim)
    length = {0: 40, 2: 200}
    keys = {s: normal(rng, n, kv_heads, dim) for s, n in length.items()}
    values = {s: normal(rng, n, kv_heads, dim) for s, n in length.items()}
    for step in range(0, 200, 24):  # interleaved growth: pages of both slots mix
        for s, n in length.items():
            assert kv.allocate(s, min(step + 24, n))
    for s in length:
        kv.set_table(lane, s)
        stream.synchronize()
        fill_cache(device, kv, s, keys[s], values[s])
    slots = [0, 2, 2, 2, 2, 0, -1, 2, 2, 0]
    pos = [0, 30, 31, 32, 199, 39, 5, -1, 127, 10**6]
    qkv = 3 * normal(rng, 10, heads + 2 * kv_heads, dim)
    out = device.from_host(np.full((10, heads * dim), 9, np.float32))
    rows = make_rows(device, [0] * 10, slots, pos)
    plan = kernels.attention.plan(lane, rows, kv, heads)
    kernels.attention.attend(lane, upload(device, qkv.reshape(10, -1)), plan, kv, 1, out)
    result = download(stream, out)
    for r, (s, p) in enumerate(zip(slots, pos, strict=True)):
        if r in (6, 7, 9):
            assert (result[r] == 0).all()
            continue
        k = keys[s][: p + 1].astype(np.float64)
        v = values[s][: p + 1].astype(np.float64)
        mask = np.ones((1, p + 1), bool)
        wanted = numpy_llama.attention(qkv[r : r + 1, :heads], k, v, mask)[0]
        np.testing.assert_allclose(result[r], wanted, atol=5e-6, err_msg=f"row {r}")


def test_attention_is_stable_for_large_scores(kernels, lane, stream):
    """Attention does not overflow if scores rise or fall to several thousand over the sequence."""
    device = kernels.device
    kv = make_kv(kernels.device, 1, 8)
    assert kv.allocate(0, 100)
    kv.set_table(lane, 0)
    stream.synchronize()
    keys = np.zeros((100, 1, 8), np.float32)
    values = np.random.default_rng(0).random((100, 1, 8))
    for slope in (90.0, -90.0):
        keys[:, 0, 0] = slope * np.arange(100)
        fill_cache(device, kv, 0, keys, values)
        qkv = np.zeros((1, 3 * 8), np.float32)
        qkv[0, 0] = np.sqrt(8)
        out = device.zeros((1, 8), "float32")
        rows = make_rows(device, [0], 0, [99])
        plan = kernels.attention.plan(lane, rows, kv, 1)
        kernels.attention.attend(lane, upload(device, qkv), plan, kv, 1, out)
        best = values[99 if slope > 0 else 0, 0]
        np.testing.assert_allclose(download(stream, out)[0], best, rtol=1e-6)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_eagle_input_concatenates_normed_embedding_and_feature(
    kernels, lane, stream, before, in_place
):
    """The EAGLE-3 input kernel writes [norm(embedding), norm(feature)] and the residual stream.

    The residual stream is the feature or, with `before`, the normed feature. The kernel may write
    the residual stream to the array of the features.
    """
    device = kernels.device
    rng = np.random.default_rng(4)
    table = rounded(normal(rng, 9, 50), "bfloat16")
    hidden = normal(rng, 4, 50)
    norms = normal(rng, 2, 50)
    g = upload(device, hidden)
    stream_out = g if in_place else device.zeros((4, 50), "float32")
    x = device.zeros((4, 100), "float32")
    kernels.norms.eagle_input(
        lane,
        upload_ints(device, [8, 0, 9, 3]),
        upload(device, table, "bfloat16"),
        g,
        upload(device, norms[0]),
        upload(device, norms[1]),
        1e-5,
        before,
        x,
        stream_out,
    )
    embedded = np.stack([table[8], table[0], np.zeros(50), table[3]])
    left = numpy_llama.rms_norm(embedded.astype(np.float64), norms[0], 1e-5)
    right = numpy_llama.rms_norm(hidden.astype(np.float64), norms[1], 1e-5)
    wanted = np.concatenate([left, right], 1)
    np.testing.assert_allclose(download(stream, x), wanted, atol=2e-6)
    residual = right if before else hidden
    np.testing.assert_allclose(stream_out.to_host(), residual, atol=2e-6)


class Operands:
    """Arrays for calls with one wrong operand."""

    def __init__(self, device, lane):
        self.device = device
        self.lane = lane
        self.x = self.zeros(4, 32)
        self.w = self.zeros(8, 32)
        self.out = self.zeros(4, 8)

    def zeros(self, *shape, dtype="float32"):
        return self.device.zeros(shape, dtype)

    def write(self, skipped_positions=0):
        kv = make_kv(self.device, 2, 8)
        rows = make_rows(self.device, [0] * 4, 0, range(4))
        return KVWrite(self.zeros(kv.positions, 8)[skipped_positions:], rows, kv, 0, 4)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("columns=8", lambda k, o: k.products.linear(o.lane, o.x, o.w, o.zeros(4, 9))),
        ("inner=32", lambda k, o: k.products.linear(o.lane, o.x, o.zeros(8, 31), o.out)),
        (
            "int32",
            lambda k, o: k.products.linear(o.lane, o.x, o.zeros(8, 32, dtype="int32"), o.out),
        ),
        (
            "copy_to",
            lambda k, o: k.products.linear(o.lane, o.x, o.w, o.out, copy_to=(o.zeros(4, 12), 5)),
        ),
        ("B=4", lambda k, o: k.elementwise.gather(o.lane, o.w, o.zeros(3, dtype="int32"), o.x)),
        ("width=32", lambda k, o: k.norms.rms_norm(o.lane, o.x, o.zeros(31), 1e-5, o.x)),
        ("heads=64", lambda k, o: k.attention.rope_and_store(o.lane, o.x, o.write())),
        (
            r"rope: table is .*, expected float32\[positions=",
            lambda k, o: k.attention.rope_and_store(o.lane, o.zeros(4, 64), o.write(1)),
        ),
    ],
)
def test_model_kernels_reject_wrong_operands(kernels, lane, device, words, call):
    """A kernel method with a wrong operand raises an error that names the wrong dimension."""
    with pytest.raises(ShapeError, match=words):
        call(kernels, Operands(device, lane))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("kernel form 'block'", {"form": "block"}),
        ("on a cuda device", {"device": NO_SOFT_DEVICE, "form": "thread"}),
        ("activations 'half'", {"form": "warp", "activations": "half"}),
    ],
)
def test_model_kernels_reject_unknown_options(device, words, options):
    with pytest.raises(OptionError, match=words) as error:
        ModelKernels(**{"device": device, **options})
    assert isinstance(error.value, GraftError)
