"""Checks of the kernels at the sizes of the model: values, bits, races and probabilities.

Values are compared with float64 references that the host computes. Output arrays are filled with
NaN before a kernel runs and are longer than the output, so that missing and misplaced writes are
found. Sums are accumulated in float32, so a value may deviate from its reference by a small
fraction of the sum of the magnitudes of its terms.

Bits are compared between launches. Every kernel must be row invariant: the bits of a row must not
depend on the number of rows, and the bits of a product must not depend on its column, its tile or
the lane that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from graft.cudagraph.driver.dtypes import E4M3, to_float32
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.host.hostwork import PythonWork
from graft.cudagraph.lanes import StreamLane
from graft.models.cache.kv import PagedKV
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.operands import NORM_GROUP, KVWrite, Norm
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rope import Rope
from graft.models.llm.rows import Rows
from graft.sampling.params import SamplingParams
from graft.tools.gpu_first.arrays import attention_rows, matrices, random_kv
from graft.tools.gpu_first.model import random_model
from graft.tools.gpu_first.sampling import BATCH, ROWS_PER_REQUEST, SamplingSetup
from graft.tools.gpu_first.session import LIMIT_S, Session

#: Numbers of rows of the checked products. To check row invariance, the rows of each product are
#: compared with the same rows of the largest product.
ROWS = (1, 4, 8, 16, 17, 32, 33, 64, 256)
SMALL_ROWS = (1, 8, 17, 33)
#: Maximum error of a sum, as a fraction of the sum of the magnitudes of its terms.
SUM_TOLERANCE = 2.0**-15
#: Maximum relative error (L2 norm) of results that depend on values rounded to bfloat16.
ROUNDED_TOLERANCE = 0.01
#: Number of columns at the start, in the middle and at the end of a result that are checked.
CHECKED_COLUMNS = 64
EPS = 1e-5


class Checker:
    """Allocates the outputs of the kernels that a section checks, and compares results."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.device = session.device
        self.kernels = ModelKernels(session.device, form="warp")  # the form that runs on GPUs
        self.rows = SMALL_ROWS if session.small else ROWS
        self.lane = StreamLane(session.stream)
        self._wrong = session.device.zeros((1,), "int32")

    def output(self, rows: int, columns: int, dtype: str = "float32") -> DeviceArray:
        """Return an output array filled with NaN, with an additional row that must stay NaN."""
        array = self.device.empty((rows + 1, columns), dtype)
        self.lane.fill(array, 0xFF)
        return array

    def to_host(self, array: DeviceArray) -> np.ndarray:
        """Synchronize, and copy an array to the host, with floating-point values as float64."""
        self.session.stream.synchronize(LIMIT_S)
        return to_float32(array.to_host(), array.dtype).astype(np.float64)

    def rows_to_host(self, array: DeviceArray, indices: np.ndarray) -> np.ndarray:
        """Synchronize, and return the rows `indices` of an array as float64."""
        unique, order = np.unique(indices, return_inverse=True)
        parts = []
        for run in np.split(unique, np.flatnonzero(np.diff(unique) > 1) + 1):
            parts.append(self.to_host(array[int(run[0]) : int(run[-1]) + 1]))
        return np.concatenate(parts)[order]

    def count_different(self, lane: Any, data: DeviceArray, expected: DeviceArray) -> None:
        """Add a kernel that counts the 32-bit words of `data` that differ from `expected`.

        If `data` is longer than `expected`, it is compared with repetitions of `expected`.
        """
        words = data.nbytes // 4
        blocks = min(-(-words // 256), 1024)
        args = [data, expected, words, expected.nbytes // 4, self._wrong]
        lane.kernel(self.session.kernels["count_different"], blocks, 256, args)

    def take_count(self) -> int:
        """Return the number of differences that were counted since the last call."""
        self.session.stream.synchronize(LIMIT_S)
        count = int(self._wrong.to_host()[0])
        self.lane.fill(self._wrong)
        return count

    def check_sums(
        self, name: str, found: np.ndarray, expected: np.ndarray, magnitude: np.ndarray
    ) -> None:
        """Check that the errors of sums are small relative to the magnitudes of their terms.

        For each element of `found`, `magnitude` has the sum of the absolute values of its terms.
        """
        error = np.abs(found - expected)
        wrong = int((~(error <= SUM_TOLERANCE * magnitude)).sum())
        largest = float(np.nanmax(error / magnitude))
        self.session.check(name, wrong, f"largest error {largest:.1e} of the terms")

    def check_rounded(
        self, name: str, found: np.ndarray, expected: np.ndarray, layers: int = 1
    ) -> None:
        """Check the relative error of `found`, which depends on values rounded to bfloat16.

        `layers` is the number of layers that rounded their inputs; the tolerance grows with it.
        """
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        wrong = 0 if error <= ROUNDED_TOLERANCE * layers else 1
        self.session.check(name, wrong, f"relative error {error:.1e}")


def checked_columns(columns: int) -> np.ndarray:
    """Return the indices of the columns to check, at the start, in the middle and at the end."""
    count = min(CHECKED_COLUMNS, columns)
    starts = {0, (columns - count) // 2, columns - count}
    return np.unique(np.concatenate([np.arange(start, start + count) for start in starts]))


# Products -----------------------------------------------------------------------------------------


class ProductCheck:
    """Checks the kernels that multiply activation rows by one weight matrix."""

    def __init__(self, checker: Checker, name: str, size: tuple[int, int], dtype: str) -> None:
        self.checker = checker
        self.name = f"{name} of {dtype}"
        self.columns, self.inner = size
        self.dtype = dtype
        session = checker.session
        self.weight = session.random_weight(size, dtype)
        self.x = session.random((max(checker.rows), self.inner))
        self.residual = session.random_float32((max(checker.rows), self.columns))

    def run(self) -> None:
        """Run the checks."""
        session = self.checker.session
        session.case(f"{self.name}: values", self.check_values)
        session.case(f"{self.name}: bits by number of rows", self.check_row_bits)
        session.case(f"{self.name}: bits by column and row", self.check_position_bits)

    def multiply(self, rows: int) -> DeviceArray:
        """Multiply the first `rows` rows of `x` by the weight matrix, and add the residual.

        The result has an additional row that must stay NaN.
        """
        checker = self.checker
        y = checker.output(rows, self.columns)
        checker.kernels.products.linear(
            checker.lane, self.x[:rows], self.weight, y[:rows], residual=self.residual[:rows]
        )
        return y

    def check_values(self) -> None:
        """Compare products with a float64 reference, and check that no other element is written."""
        checker = self.checker
        columns = checked_columns(self.columns)
        weight = checker.rows_to_host(self.weight, columns)
        for rows in checker.rows:
            y = checker.to_host(self.multiply(rows))
            x = checker.to_host(self.x[:rows])
            residual = checker.to_host(self.residual[:rows])[:, columns]
            expected = x @ weight.T + residual
            magnitude = np.abs(x) @ np.abs(weight).T + np.abs(residual)
            checker.check_sums(f"{self.name}, {rows} rows", y[:rows, columns], expected, magnitude)
            unwritten = int(np.isnan(y[:rows]).sum())
            beyond = int((~np.isnan(y[rows])).sum())
            checker.session.check(f"{self.name}, {rows} rows, writes", unwritten + beyond)

    def check_row_bits(self) -> None:
        """Check that the bits of a row do not depend on the number of rows of the product."""
        checker = self.checker
        reference = self.multiply(max(checker.rows))
        for rows in checker.rows[:-1]:
            y = self.multiply(rows)
            checker.count_different(checker.lane, y[:rows], reference[:rows])
        checker.session.check(f"{self.name}, bits of rows", checker.take_count())

    def check_position_bits(self) -> None:
        """Multiply equal rows by equal columns, and check that all results have the same bits."""
        checker = self.checker
        device = checker.device
        columns = min(self.columns, 4096)
        one_column = np.broadcast_to(self.weight[:1].to_host(), (columns, self.inner))
        one_row = np.broadcast_to(self.x[:1].to_host(), self.x.shape)
        weight = device.from_host(np.ascontiguousarray(one_column), self.dtype)
        x = device.from_host(np.ascontiguousarray(one_row), "bfloat16")
        for rows in checker.rows:
            y = checker.output(rows, columns)
            checker.kernels.products.linear(checker.lane, x[:rows], weight, y[:rows])
            flat = y[:rows].reshape(rows * columns)
            checker.count_different(checker.lane, flat, flat[:1])
        checker.session.check(f"{self.name}, bits of columns", checker.take_count())


def check_linears(session: Session) -> None:
    """Check the products with all weight matrices of the model, in 16-bit and in 8-bit formats."""
    checker = Checker(session)
    for name, size in matrices(session.shape).items():
        for dtype in ("bfloat16", E4M3):
            ProductCheck(checker, name, size, dtype).run()


# Products as the model calls them -----------------------------------------------------------------


def interleaved_pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row indices of both halves of an interleaved matrix; see `Weights.stacked`."""
    index = np.arange(count)
    first = index // 8 * 16 + index % 8
    return first, first + 8


def check_epilogues(session: Session) -> None:
    """Check matrix products with the epilogues of a decoder layer.

    The epilogues are the gate, the folded norm, and RoPE with KV-cache writes.
    """
    checker = Checker(session)
    for rows in checker.rows:
        session.case(f"gate, {rows} rows", check_gate, checker, rows)
        session.case(f"folded norm, {rows} rows", check_norm, checker, rows)
        session.case(f"RoPE, KV write, {rows} rows", check_rope, checker, rows)


def check_gate(checker: Checker, rows: int) -> None:
    """Check a product of `rows` rows whose epilogue computes silu(gate) * up."""
    hidden = checker.session.shape["hidden_size"]
    inner = checker.session.shape["intermediate_size"]
    weight = checker.session.random_weight((2 * inner, hidden), "bfloat16")
    x = checker.session.random((rows, hidden))
    out = checker.output(rows, inner, "bfloat16")
    checker.kernels.products.gated_linear(checker.lane, x, weight, out[:rows])
    columns = checked_columns(inner)
    gate_rows, up_rows = interleaved_pairs(inner)
    x_host = checker.to_host(x)
    gate = x_host @ checker.rows_to_host(weight, gate_rows[columns]).T
    up = x_host @ checker.rows_to_host(weight, up_rows[columns]).T
    expected = gate / (1 + np.exp(-gate)) * up
    found = checker.to_host(out)
    checker.check_rounded(f"gate, {rows} rows", found[:rows, columns], expected)
    unwritten = int(np.isnan(found[:rows]).sum()) + int((~np.isnan(found[rows])).sum())
    checker.session.check(f"gate, {rows} rows, writes", unwritten)


def check_norm(checker: Checker, rows: int) -> None:
    """Check two consecutive products of `rows` rows, with a residual and a folded RMSNorm between.

    The first product adds the residual and applies the norm weight; the second divides its result
    by the root mean square of each row.
    """
    device = checker.device
    hidden = checker.session.shape["hidden_size"]
    scale = math.sqrt(3 / hidden)
    first = checker.session.random_weight((hidden, hidden), "bfloat16", scale)
    second = checker.session.random_weight((256, hidden), "bfloat16", scale)
    x = checker.session.random((rows, hidden))
    residual = checker.session.random_float32((rows, hidden))
    weight = np.random.default_rng(0).uniform(0.5, 1.5, hidden).astype(np.float32)
    norm = Norm(
        device.from_host(weight),
        EPS,
        checker.output(rows, hidden, "bfloat16")[:rows],
        checker.output(rows, hidden // NORM_GROUP)[:rows],
    )
    y = checker.output(rows, hidden)
    z = checker.output(rows, 256)
    checker.kernels.products.linear(checker.lane, x, first, y[:rows], residual=residual, norm=norm)
    checker.kernels.products.linear(checker.lane, norm, second, z[:rows])
    stream = checker.to_host(x) @ checker.to_host(first).T + checker.to_host(residual)
    root = np.sqrt((stream**2).mean(axis=1, keepdims=True) + EPS)
    expected = (stream / root * weight) @ checker.to_host(second).T
    checker.check_rounded(f"folded norm, {rows} rows", checker.to_host(z)[:rows], expected)


def check_rope(checker: Checker, rows: int) -> None:
    """Check the fused QKV product of `rows` rows: rotated queries, and written keys and values."""
    shape = checker.session.shape
    dim = shape["head_dim"]
    heads = shape["num_attention_heads"]
    kv_heads = shape["num_key_value_heads"]
    hidden = shape["hidden_size"]
    width = (heads + 2 * kv_heads) * dim
    kv = random_kv(checker.session, 512, layers=1, slots=1)
    table = Rope(500000.0).table(kv.positions, dim)
    weight = checker.session.random_weight((width, hidden), "bfloat16", math.sqrt(3 / hidden))
    x = checker.session.random((rows, hidden))
    positions = (512 - rows + np.arange(rows)).astype(np.int32)
    where = Rows(
        checker.device.from_host(positions),
        checker.device.from_host(np.zeros(rows, np.int32)),
        checker.device.from_host(positions),
        rows_per_slot=rows,
    )
    qkv = checker.output(rows, width)
    write = KVWrite(checker.device.from_host(table), where, kv, 0, heads)
    checker.kernels.attention.project_qkv(checker.lane, x, weight, qkv[:rows], write)
    products = (checker.to_host(x) @ checker.to_host(weight).T).reshape(rows, -1, dim)
    rotated, plain = rotate(products, table[positions])
    found = checker.to_host(qkv)[:rows, : heads * dim].reshape(rows, heads, dim)
    checker.check_rounded(f"queries, {rows} rows", found, rotated[:, :heads])
    keys = cached(checker, kv.k[0], kv, 0)[positions]
    checker.check_rounded(f"keys, {rows} rows", keys, rotated[:, heads : heads + kv_heads])
    values = cached(checker, kv.v[0], kv, 0)[positions]
    checker.check_rounded(f"values, {rows} rows", values, plain[:, heads + kv_heads :])


def rotate(heads: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return heads with and without RoPE, with their elements in the usual order.

    `heads` has the shape [rows, heads, head_dim] and contains products with the interleaved rows of
    a fused QKV weight. `table` has the shape [rows, head_dim] and contains the cosines and sines of
    each row's position.
    """
    first, second = interleaved_pairs(heads.shape[-1] // 2)
    one, two = heads[..., first], heads[..., second]
    cos, sin = np.split(table.astype(np.float64)[:, None], 2, axis=-1)
    rotated = np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
    return rotated, np.concatenate([one, two], axis=-1)


def cached(checker: Checker, layer: DeviceArray, kv: PagedKV, slot: int) -> np.ndarray:
    """Return the entries of a slot in a KV-cache array of one layer, by position, in float64."""
    pages = checker.rows_to_host(layer, np.array(kv.pages_of(slot)))
    return pages.reshape(-1, kv.kv_heads, kv.head_dim)


# Attention ----------------------------------------------------------------------------------------


def check_attention(session: Session) -> None:
    """Check attention for several context lengths and numbers of rows, and its row invariance."""
    checker = Checker(session)
    for length in (32, 80) if session.small else (256, 2048, 4096):
        kv = random_kv(session, length, layers=1, slots=BATCH)
        for rows in (1, 4, 32):
            name = f"{length} positions, {rows} rows"
            session.case(name, check_rows, checker, kv, length, rows)


def check_rows(checker: Checker, kv: PagedKV, length: int, count: int) -> None:
    """Check the attention of `count` rows: values, writes, and row invariance of the first row."""
    shape = checker.session.shape
    dim = shape["head_dim"]
    heads = shape["num_attention_heads"]
    rows = attention_rows(checker.device, length, count)
    qkv = checker.session.random_float32((count, (heads + 2 * kv.kv_heads) * dim), 3.0)
    out = checker.output(count, heads * dim)
    checker.kernels.attention.attend(checker.lane, qkv, rows, kv, 0, heads, out[:count])
    found = checker.to_host(out)
    expected = reference_attention(checker, checker.to_host(qkv)[:, : heads * dim], kv, length)
    name = f"{length} positions, {count} rows"
    checker.check_rounded(name, found[:count], expected)
    beyond = int(np.isnan(found[:count]).sum()) + int((~np.isnan(found[count])).sum())
    checker.session.check(f"{name}, writes", beyond)
    alone = checker.output(1, heads * dim)
    checker.kernels.attention.attend(checker.lane, qkv[:1], rows.first(1), kv, 0, heads, alone[:1])
    checker.count_different(checker.lane, alone[:1], out[:1])
    checker.session.check(f"{name}, bits of the first row", checker.take_count())


def reference_attention(
    checker: Checker, queries: np.ndarray, kv: PagedKV, length: int
) -> np.ndarray:
    """Compute the attention output for rows of `attention_rows` in float64 on the host."""
    count = len(queries)
    slots = range(-(-count // 4))
    all_keys = [cached(checker, kv.k[0], kv, slot) for slot in slots]
    all_values = [cached(checker, kv.v[0], kv, slot) for slot in slots]
    outputs = []
    for row, query in enumerate(queries.reshape(count, kv.kv_heads, -1, kv.head_dim)):
        end = length - min(count, 4) + row % 4 + 1
        keys = all_keys[row // 4][:end]
        values = all_values[row // 4][:end]
        scores = np.einsum("hgd,phd->hgp", query, keys) / math.sqrt(kv.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        outputs.append(np.einsum("hgp,phd->hgd", weights, values).ravel())
    return np.array(outputs)


# Model --------------------------------------------------------------------------------------------

#: Number of layers and of rows of the checked forward pass.
MODEL_LAYERS = 2
MODEL_ROWS = 8


def check_model(session: Session) -> None:
    """Check the logits of a model with few layers, and that single rows give the same bits."""
    checker = Checker(session)
    shape = session.shape | {"num_hidden_layers": MODEL_LAYERS}
    model = random_model(session.device, shape, form="warp")
    for slot in range(2):
        model.kv.allocate(slot, MODEL_ROWS)
        model.kv.set_table(checker.lane, slot)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, MODEL_ROWS, np.int32)
    session.case("logits", check_logits, checker, model, tokens)


def check_logits(checker: Checker, model: LlamaModel, tokens: np.ndarray) -> None:
    """Compare one forward pass with a float64 reference, and with forward passes of single rows."""
    device = checker.device
    together = checker.output(MODEL_ROWS, model.vocab_size)
    alone = checker.output(MODEL_ROWS, model.vocab_size)

    def run(slot: int, first: int, end: int, logits: DeviceArray) -> None:
        positions = np.arange(first, end, dtype=np.int32)
        rows = Rows(
            device.from_host(tokens[first:end]),
            device.from_host(np.full(end - first, slot, np.int32)),
            device.from_host(positions),
            rows_per_slot=end - first,
        )
        model.forward(checker.lane, rows, None, logits[first:end])

    run(0, 0, MODEL_ROWS, together)
    for row in range(MODEL_ROWS):
        run(1, row, row + 1, alone)
    columns = checked_columns(model.vocab_size)
    found = checker.to_host(together)[:MODEL_ROWS, columns]
    head = checker.rows_to_host(model.lm_head, columns)
    expected = reference_output(checker, model, tokens) @ head.T
    checker.check_rounded("logits", found, expected, MODEL_LAYERS)
    checker.count_different(checker.lane, alone[:MODEL_ROWS], together[:MODEL_ROWS])
    checker.session.check("logits, bits of single rows", checker.take_count())


def reference_output(checker: Checker, model: LlamaModel, tokens: np.ndarray) -> np.ndarray:
    """Compute the input of the LM head in float64, for a model whose norm weights are 1."""
    config = model.config
    dim = config.head_dim
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    count = len(tokens)
    table = config.rope.table(count, dim)
    causal = np.tril(np.ones((count, count), bool))

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps)

    def multiply(x: np.ndarray, weight: Any) -> np.ndarray:
        return x @ checker.to_host(weight).T

    x = checker.rows_to_host(model.embedding, tokens)
    for layer in model.stack.layers:
        qkv = multiply(norm(x), layer.qkv).reshape(count, -1, dim)
        rotated, plain = rotate(qkv, table)
        queries = rotated[:, :heads].reshape(count, kv_heads, -1, dim)
        keys = rotated[:, heads : heads + kv_heads]
        values = plain[:, heads + kv_heads :]
        scores = np.einsum("qhgd,khd->hgqk", queries, keys) / math.sqrt(dim)
        scores[..., ~causal] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("hgqk,khd->qhgd", weights, values).reshape(count, -1)
        x = x + multiply(attended, layer.out)
        both = multiply(norm(x), layer.gate_up)
        gate_rows, up_rows = interleaved_pairs(both.shape[1] // 2)
        gate = both[:, gate_rows]
        x = x + multiply(gate / (1 + np.exp(-gate)) * both[:, up_rows], layer.down)
    return norm(x)


# Races --------------------------------------------------------------------------------------------


def check_races(session: Session) -> None:
    """Repeat split products and split attention, and require the same bits each time.

    The blocks of a split kernel write partial results, and the last block to finish adds them.
    """
    checker = Checker(session)
    repetitions = 20 if session.small else 10_000
    hidden = session.shape["hidden_size"]
    for rows in (33,) if session.small else (17, 32, 64):
        x = session.random((rows, hidden))
        weight = session.random_weight((hidden, hidden), "bfloat16")
        y = session.device.zeros((rows, hidden), "float32")
        multiply = partial(multiply_on, checker, x, weight, y)
        name = f"split product, {rows} rows, {repetitions} times"
        session.case(name, repeat, checker, name, multiply, y, repetitions)
    length = 80 if session.small else 4096
    kv = random_kv(session, length, layers=1, slots=BATCH)
    heads = session.shape["num_attention_heads"]
    dim = session.shape["head_dim"]
    qkv = session.random_float32((4, (heads + 2 * kv.kv_heads) * dim), 3.0)
    out = session.device.zeros((4, heads * dim), "float32")
    rows_of_one = attention_rows(session.device, length, 4)

    def attend(lane: Any) -> None:
        checker.kernels.attention.attend(lane, qkv, rows_of_one, kv, 0, heads, out)

    name = f"split attention, {repetitions} times"
    session.case(name, repeat, checker, name, attend, out, repetitions)


def multiply_on(
    checker: Checker, x: DeviceArray, weight: DeviceArray, y: DeviceArray, lane: Any
) -> None:
    """Add to a lane the kernel that multiplies `x` by `weight` and writes the product to `y`."""
    checker.kernels.products.linear(lane, x, weight, y)


def repeat(
    checker: Checker, name: str, launch: Callable[[Any], None], out: DeviceArray, repetitions: int
) -> None:
    """Launch a kernel `repetitions` times and compare each result with the first one.

    `launch` adds the kernel, which writes `out`, to a lane.
    """
    launch(checker.lane)
    checker.session.stream.synchronize(LIMIT_S)
    reference = checker.device.from_host(out.to_host(), out.dtype)
    per_graph = min(repetitions, 100)
    graph = Graph(checker.device, "repeated")
    lane = graph.lane("main")
    for _ in range(per_graph):
        lane.fill(out, 0xFF)
        launch(lane)
        checker.count_different(lane, out, reference)
    executable = graph.instantiate()
    for _ in range(repetitions // per_graph):
        executable.launch(checker.session.stream)
    executable.synchronize(LIMIT_S)
    executable.close()
    checker.session.check(name, checker.take_count())


def check_hops(session: Session) -> None:
    """Check, for each transport, that kernels and many host steps see each other's writes."""
    for transport in ("host", "mailbox", "spinkernel"):
        session.case(transport, check_answers, session, transport)


def check_answers(session: Session, transport: str) -> None:
    """Check that kernels and host steps see each other's writes.

    A kernel writes a number, the host step writes an answer that depends on the number, and the
    next kernel checks the answer.
    """
    per_graph, replays = (4, 5) if session.small else (100, 100)
    question = session.device.pinned((1,), "int32")
    answer = session.device.pinned((1,), "int32")
    wrong = session.device.zeros((1,), "int32")
    answer.array[0] = 1

    def reply() -> None:
        answer.array[0] = 3 * question.array[0] + 1

    graph = Graph(session.device, transport)
    lane = graph.lane("main")
    for _ in range(per_graph):
        lane.kernel(session.kernels["ask"], 1, 1, [question, answer, wrong])
        getattr(lane, transport)(PythonWork(reply))
    executable = graph.instantiate()
    for _ in range(replays):
        executable.launch(session.stream)
        executable.synchronize(LIMIT_S)
    executable.close()
    steps = per_graph * replays
    lost = steps - int(question.array[0])
    name = f"{transport}, {steps} host steps"
    session.check(name, int(wrong.to_host()[0]) + abs(lost))


# Sampling -----------------------------------------------------------------------------------------

#: Logits of the likely tokens. All other tokens have the logit -60.
LOGITS = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0])
#: Index of the likely token that the grammar forbids.
FORBIDDEN = 1
#: Upper limit of the standardized chi-square statistic. A correct sampler exceeds it with
#: probability 10^-6.
MAX_DEVIATION = 4.75


def check_sampling(session: Session) -> None:
    """Compare the frequencies of sampled tokens with their probabilities.

    The case "rejection sampling" counts the first token that verification commits. Its
    probabilities must be those of the target, although the drafts are always the same tokens.
    """
    setup = SamplingSetup(session)
    vocab = session.shape["vocab_size"]
    tokens = np.linspace(5, vocab - 1, len(LOGITS)).astype(np.int64)
    setup.forbid(int(tokens[FORBIDDEN]))
    plain = SamplingParams(temperature=1.0, verify="coupled")
    for name, params in (
        ("temperature 1", plain),
        ("temperature 0.7", replace(plain, temperature=0.7)),
        ("top-k 3", replace(plain, top_k=3)),
        ("top-p 0.7", replace(plain, top_p=0.7)),
        ("min-p 0.3", replace(plain, min_p=0.3)),
        ("rejection sampling", replace(plain, verify="rejection")),
    ):
        session.case(name, check_frequencies, setup, name, params, tokens)


def expected_probabilities(params: SamplingParams) -> np.ndarray:
    """Return the probabilities of the tokens with the logits `LOGITS` after mask and filters."""
    p = np.exp(LOGITS / params.temperature)
    p[FORBIDDEN] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= params.top_p]] = False
    keep &= p >= params.min_p * p.max()
    p[~keep] = 0
    return p / p.sum()


def check_frequencies(
    setup: SamplingSetup, name: str, params: SamplingParams, tokens: np.ndarray
) -> None:
    """Sample many times with different seeds, and test the frequencies with a chi-square test.

    `tokens` are the tokens with the logits `LOGITS`.
    """
    sampled = sample_tokens(setup, params, tokens)
    probabilities = expected_probabilities(params)
    observed = np.array([(sampled == token).sum() for token in tokens])
    possible = probabilities > 0
    impossible = len(sampled) - int(observed[possible].sum())
    expected = len(sampled) * probabilities[possible]
    chi2 = float(((observed[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    deviation = 0.0
    if freedom:  # Wilson and Hilferty's approximation
        variance = 2 / (9 * freedom)
        deviation = ((chi2 / freedom) ** (1 / 3) - 1 + variance) / math.sqrt(variance)
    note = f"{len(sampled)} samples, {deviation:.1f} standard deviations"
    setup.session.check(name, impossible + (deviation > MAX_DEVIATION), note)


def sample_tokens(setup: SamplingSetup, params: SamplingParams, tokens: np.ndarray) -> np.ndarray:
    """Sample with different seeds and return the tokens. `tokens` have the logits `LOGITS`.

    With rejection sampling, these are the first tokens that verification commits for each request,
    otherwise the tokens that are sampled for each row.
    """
    session = setup.session
    values = np.full((BATCH * ROWS_PER_REQUEST, session.shape["vocab_size"]), -60, np.float32)
    values[:, tokens] = LOGITS
    logits = session.device.from_host(values)
    slots = setup.join(params)
    slots["drafts"][:, : ROWS_PER_REQUEST - 1] = tokens[0]
    rows = setup.row_map(BATCH, ROWS_PER_REQUEST)
    graph = Graph(session.device, "sampling")
    setup.sampler.target.sample(graph.lane("main"), logits, rows)
    if params.verify == "rejection":
        setup.sampler.verifier.verify(graph.lane("main"), rows, setup.ring)
    executable = graph.instantiate()
    rng = np.random.default_rng(1)
    sampled = []
    for _ in range(20 if session.small else 300):
        slots["seed"] = rng.integers(1, 2**62, BATCH)
        setup.state.copy_from(slots)
        executable.launch(session.stream)
        executable.synchronize(LIMIT_S)
        if params.verify == "rejection":
            sampled.append(setup.first_tokens())
        else:
            sampled.append(setup.sampler.arrays.target_tokens.to_host())
    executable.close()
    return np.concatenate(sampled)
