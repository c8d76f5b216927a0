"""Model kernels at the sizes of an 8B Llama, or at small sizes on the soft device.

Outputs are filled with NaN before a kernel runs and have a row more than the result, so that
missing and misplaced writes are found. Large results are compared with float64 references at some
columns.
"""

import numpy as np
import numpy_llama
import pytest
from gpu_util import LIMIT_S, PROBE, random_array
from model_util import allocate_pages, forward, load_llama, make_rows, same_bits, upload
from test_attention import Case
from tiny_models import llama_config, make_tiny_llama

from graft.cudagraph.driver.dtypes import E4M3, to_float32
from graft.cudagraph.lanes import StreamLane
from graft.models.llm.kernels.library import ModelKernels

#: Output and input features of the weight matrices, on a GPU and on the soft device.
MATRICES = {
    "qkv": ((6144, 4096), (192, 128)),
    "out": ((4096, 4096), (128, 128)),
    "gate, up": ((28672, 4096), (512, 128)),
    "down": ((4096, 14336), (128, 256)),
    "head": ((128256, 4096), (2048, 128)),
}
ROWS = ((1, 4, 8, 16, 17, 32, 33, 64, 256), (1, 8, 17, 33))
#: Maximum error of a sum, as a fraction of the sum of the magnitudes of its terms.
SUM_TOLERANCE = 2.0**-15
#: Maximum relative error (L2 norm) of results that depend on values rounded to 16 bits.
ROUNDED_TOLERANCE = 0.01


@pytest.fixture
def lane(stream):
    return StreamLane(stream)


class Product:
    """Activations of the maximum number of rows, a weight matrix and a residual."""

    def __init__(self, device, lane, name, dtype, small):
        self.columns, self.inner = MATRICES[name][small]
        self.rows = ROWS[small]
        self.device = device
        self.lane = lane
        self.kernels = ModelKernels(device, "warp")  # the form that runs on GPUs
        self.weight = random_array(device, (self.columns, self.inner), dtype, 0.02)
        self.x = random_array(device, (max(self.rows), self.inner))
        self.residual = random_array(device, (max(self.rows), self.columns), "float32")

    def run(self, rows):
        """Multiply the first rows and add the residual; return the array with an extra row."""
        y = self.device.empty((rows + 1, self.columns), "float32")
        self.lane.fill(y, 0xFF)  # NaN
        self.kernels.products.linear(
            self.lane, self.x[:rows], self.weight, y[:rows], residual=self.residual[:rows]
        )
        self.lane.stream.synchronize(LIMIT_S)
        return y


def to_host(array):
    return to_float32(array.to_host(), array.dtype).astype(np.float64)


@pytest.fixture(params=["bfloat16", pytest.param(E4M3, marks=pytest.mark.full)])
def dtype(request):
    return request.param


@pytest.mark.parametrize(
    "name",
    ["out", *(pytest.param(name, marks=pytest.mark.full) for name in MATRICES if name != "out")],
)
def test_products_equal_reference_and_rows_of_larger_products(device, lane, name, dtype, small):
    """The bits of a row do not depend on the number of rows."""
    product = Product(device, lane, name, dtype, small)
    middle = product.columns // 2
    checked = [slice(0, 32), slice(middle, middle + 32), slice(product.columns - 32, None)]
    largest = product.run(max(product.rows)).to_host()
    x = to_host(product.x)
    for part in checked:
        start, stop, _ = part.indices(product.columns)
        weight = to_host(product.weight[start:stop])
        residual = product.residual.to_host()[:, part]
        expected = x @ weight.T + residual
        magnitude = np.abs(x) @ np.abs(weight).T + np.abs(residual)
        assert (np.abs(largest[:-1, part] - expected) <= SUM_TOLERANCE * magnitude).all()
    for rows in product.rows:
        y = product.run(rows).to_host()
        assert np.isnan(y[-1]).all(), f"{rows} rows: a write after the last row"
        assert same_bits(y[:-1], largest[:rows].copy()), f"{rows} rows"


@pytest.mark.full
def test_product_bits_do_not_depend_on_column_and_row(device, lane, dtype, small):
    """Equal rows and equal columns give equal results in each tile and lane."""
    product = Product(device, lane, "out", dtype, small)
    one_column = np.broadcast_to(product.weight[:1].to_host(), product.weight.shape)
    one_row = np.broadcast_to(product.x[:1].to_host(), product.x.shape)
    product.weight = device.from_host(np.ascontiguousarray(one_column), dtype)
    product.x = device.from_host(np.ascontiguousarray(one_row), "bfloat16")
    product.residual = device.zeros(product.residual.shape, "float32")
    for rows in product.rows:
        y = product.run(rows).to_host()[:-1]
        assert same_bits(y, np.full_like(y, y[0, 0])), f"{rows} rows"


@pytest.mark.parametrize(
    "length",
    [(256, 70), *(pytest.param(n, marks=pytest.mark.full) for n in ((2048, 130), (4096, 200)))],
    ids=str,
)
def test_attention_equals_softmax_and_single_rows(device, stream, length, small):
    """Rows of two slots are correct, and the first one has the bits of a row that runs alone."""
    heads, kv_heads, dim = (4, 1, 64) if small else (32, 8, 128)
    case = Case(device, heads, kv_heads, dim, length=length[small])
    last = case.length - 1
    slots = [0] * 4 + [1] * 4
    positions = [last - 3, last - 2, last - 1, last] * 2
    found = case.on_stream(stream, slots, positions, 4)
    for row, slot, position in zip(found, slots, positions, strict=True):
        expected = case.wanted(slot, position).ravel()
        assert np.linalg.norm(row - expected) <= ROUNDED_TOLERANCE * np.linalg.norm(expected)
    assert same_bits(case.on_stream(stream, slots[:1], positions[:1], 4), found[:1].copy())


@pytest.mark.full
def test_forward_pass_equals_reference_in_all_chunk_sizes(device, stream, tmp_path, small):
    """A layer and the LM head, with norms, RoPE, gates and residuals.

    Chunks of 1, 8 and 33 tokens give the bits of one chunk of 42 tokens.
    """
    sizes = (64, 128, 2, 1, 64) if small else (4096, 4096, 32, 8, 128)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields = dict(zip((*names, "head_dim"), sizes, strict=True))
    fields |= {"num_hidden_layers": 1, "vocab_size": 512, "tie_word_embeddings": False}
    weights = make_tiny_llama(tmp_path, dtype="bfloat16", **fields)
    model = load_llama(device, tmp_path, form="warp")
    tokens = 7 * np.arange(42)
    for slot in (0, 1):
        allocate_pages(stream, model.kv, slot, 42)
    chunks = [(0, 1), (1, 9), (9, 42)]
    parts = [forward(stream, model, tokens[a:b], 0, np.arange(a, b)) for a, b in chunks]
    logits = np.concatenate(parts)
    expected = numpy_llama.llama_logits(weights, llama_config(**fields), tokens)
    assert np.linalg.norm(logits - expected) <= ROUNDED_TOLERANCE * np.linalg.norm(expected)
    assert same_bits(forward(stream, model, tokens, 1, np.arange(42)), logits)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["product", "attention"])
def test_blocks_that_combine_partial_results_give_same_bits(device, lane, kernel, small):
    """The last block to arrive combines the partial results, whichever block that is."""
    repetitions = 20 if small else 10_000
    if kernel == "product":
        product = Product(device, lane, "down", "bfloat16", small)
        out = device.empty((32, product.columns), "float32")

        def launch():
            product.kernels.products.linear(lane, product.x[:32], product.weight, out)
    else:
        heads, kv_heads, dim = (4, 1, 64) if small else (32, 8, 128)
        case = Case(device, heads, kv_heads, dim, length=200 if small else 4096)
        rows = make_rows(device, [0] * 8, [0] * 4 + [1] * 4, [case.length - 1] * 8)
        qkv = random_array(device, (8, (heads + 2 * kv_heads) * dim), "float32", 3.0)
        out = device.empty((8, heads * dim), "float32")

        def launch():
            plan = case.kernels.attention.plan(lane, rows, case.kv, heads)
            case.kernels.attention.attend(lane, qkv, plan, case.kv, 1, out)

    launch()
    lane.stream.synchronize(LIMIT_S)
    expected = upload(device, out.to_host())
    wrong = device.zeros((1,), "int32")
    words = out.nbytes // 4
    for _ in range(repetitions):
        lane.fill(out, 0xFF)
        launch()
        args = [out, expected, words, words, wrong]
        lane.kernel(device.load(PROBE)["count_different"], min(-(-words // 256), 512), 256, args)
    lane.stream.synchronize(10 * LIMIT_S)
    assert wrong.to_host()[0] == 0
