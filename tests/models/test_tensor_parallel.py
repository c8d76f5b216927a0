"""Tests of tensor parallelism: shards, sums over ranks, outputs, and failures of ranks."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import model_util
import numpy as np
import pytest
from engine_util import TARGET
from tiny_models import QWEN2, SMOLLM3, make_tiny_llama, make_tiny_tokenizer

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.driver.dtypes import to_float32
from graft.cudagraph.errors import DeadlineError, OptionError
from graft.cudagraph.graph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.ranks.nccl import NcclAllGather
from graft.models.llm import worker_rank
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.operands import Norm
from graft.models.llm.sharding import Shard, ShardedWeights
from graft.models.llm.weights import ScaledMatrix
from graft.tools.demo.smollm import cache_folder

MPIEXEC = Path(sys.executable).with_name("mpiexec")
CONFIG = LlamaConfig.from_dir(TARGET)
SMOL = replace(
    CONFIG,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
)


def run_ranks(case, told="", alone=False):
    """Run a case of rank_worker.py on two ranks; return exit code, stdout and stderr.

    All processes have exited when the function returns. With `alone`, every rank runs in a shell
    that exits with status 0, so the launcher does not terminate the other ranks when one rank
    fails.
    """
    pytest.importorskip("mpi4py", reason="the extra parallel is not installed")
    if not MPIEXEC.is_file():
        pytest.skip(f"no launcher at {MPIEXEC}: the extra parallel brings one")
    if os.environ.get("GRAFT_DEVICE") == "cuda":
        pytest.skip("two ranks need two CUDA devices and NCCL")
    rank = [sys.executable, str(Path(__file__).with_name("rank_worker.py")), case, str(told)]
    if alone:
        rank = ["sh", "-c", f"{shlex.join(rank)}; true"]
    ranks = subprocess.Popen(
        [str(MPIEXEC), *["-disable-auto-cleanup"] * alone, "-n", "2", *rank],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, errors = ranks.communicate(timeout=240)
    finally:
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)
    return ranks.returncode, said, errors


@pytest.mark.parametrize(
    ("config", "size", "keys", "inner"),
    [
        (SMOL, 2, [(0, 2), (2, 3)], [(0, 768), (768, 1536)]),
        (SMOL, 3, [(0, 1), (1, 2), (2, 3)], [(0, 512), (512, 1024), (1024, 1536)]),
        (CONFIG, 2, [(0, 1), (1, 2)], [(0, 256), (256, 512)]),
        (replace(SMOL, intermediate_size=33), 2, [(0, 2), (2, 3)], [(0, 17), (17, 33)]),
    ],
)
def test_tensor_parallel_shards_cover_the_model(config, size, keys, inner):
    """KV heads and MLP columns are split without gap or overlap.

    The query heads that share a KV head belong to the same rank.
    """
    shards = [Shard.of(config, rank, size) for rank in range(size)]
    assert [(s.kv_heads, s.mlp_columns) for s in shards] == list(zip(keys, inner, strict=True))
    group = config.num_attention_heads // config.num_key_value_heads
    assert all(
        s.local_config.num_attention_heads == group * s.local_config.num_key_value_heads
        for s in shards
    )
    whole = {
        "q_proj": (config.num_attention_heads * config.head_dim, 7),
        "v_proj": (config.num_key_value_heads * config.head_dim, 7),
        "o_proj": (7, config.num_attention_heads * config.head_dim),
        "up_proj": (config.intermediate_size, 7),
        "down_proj": (7, config.intermediate_size),
    }
    for name, shape in whole.items():
        matrix = np.arange(shape[0] * shape[1]).reshape(shape)
        parts = [matrix[shard.slices()[name]] for shard in shards]
        np.testing.assert_array_equal(np.concatenate(parts, int(shape[0] == 7)), matrix)


def test_tensor_parallel_rejects_more_ranks_than_kv_heads():
    with pytest.raises(OptionError, match="4 ranks are too many for a model with 3 KV heads"):
        Shard.of(SMOL, 0, 4)


def test_tensor_parallel_shards_have_biases_of_their_heads(device):
    """The biases of all ranks together are those of the checkpoint (Qwen2)."""
    folder = model_util.FIXTURES / "qwen2_bfloat16"
    config = LlamaConfig.from_dir(folder)
    checkpoint = Checkpoint(folder)
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    rows = [config.num_attention_heads * 8, *[config.num_key_value_heads * 8] * 2]
    parts = {f"{name}.weight": count for name, count in zip(names, rows, strict=True)}
    biases = []
    for rank in range(2):
        shard = Shard.of(config, rank, 2)
        weights = ShardedWeights(device, checkpoint, "checkpoint", shard, None)
        qkv = weights.stacked(parts, config.hidden_size, bias=True)
        assert qkv.shape == (sum(rows) // 2, config.hidden_size)
        biases.append(np.split(qkv.bias.to_host(), [rows[0] // 2, (rows[0] + rows[1]) // 2]))
    for name, halves in zip(names, zip(*biases, strict=True), strict=True):
        whole = to_float32(*checkpoint.get(f"{name}.bias"))
        np.testing.assert_array_equal(np.concatenate(halves), whole)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "smollm3"])
def test_tensor_parallel_outputs_equal_one_process_in_every_architecture(tmp_path, name):
    """The greedy log probabilities of a model on two ranks equal those of one process."""
    architecture = {"qwen2": QWEN2, "smollm3": SMOLLM3}[name]
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    make_tiny_llama(tmp_path, **architecture, rope_scaling=scaling)
    make_tiny_tokenizer(tmp_path)
    code, said, errors = run_ranks("architecture", tmp_path)
    assert code == 0, errors
    alone, ranks = json.loads(said)
    assert alone["tokens"] == ranks["tokens"]
    for request, logprobs in alone["logprobs"].items():
        np.testing.assert_allclose(ranks["logprobs"][request], logprobs, atol=1e-4)


class FixedAllGather:
    """Replaces the all-gather of rank 1 of 3.

    `others` holds the partial products of ranks 0 and 2.
    """

    def __init__(self, device, others):
        self.device = device
        self.others = others

    def local_buffer(self, rows, columns):
        return self.device.zeros((rows, columns), "float32")

    def all_gather(self, lane, own):
        lane.stream.synchronize()
        parts = [self.others[0], own.to_host(), self.others[1]]
        return self.device.from_host(np.stack(parts))


@pytest.mark.parametrize("form", model_util.FORMS)
def test_tensor_parallel_partial_products_are_added_in_rank_order(device, stream, form):
    """A row-parallel product is ((p0 + p1) + p2) + residual, bit for bit.

    p0 to p2 are the partial products of the ranks. The copy and the norm are computed from the sum,
    which equals the product without sharding up to rounding.
    """
    rng = np.random.default_rng(5)
    x = rng.standard_normal((5, 96), np.float32)
    weight = rng.standard_normal((40, 96), np.float32)
    residual = rng.standard_normal((5, 40), np.float32)
    scale = np.ones(40, np.float32)
    kernels = ModelKernels(device, form)
    lane = StreamLane(stream)
    products = []
    for i in range(3):
        out = device.zeros((5, 40), "float32")
        columns = slice(32 * i, 32 * i + 32)
        part = [model_util.upload(device, a[:, columns]) for a in (x, weight)]
        kernels.products.linear(lane, part[0], part[1], out)
        products.append(model_util.download(stream, out))
        if i == 1:
            mine = part
    out = model_util.upload(device, residual)
    normed = device.zeros((5, 40), "float32")
    tap = device.zeros((5, 50), "float32")
    again = device.zeros((5, 40), "float32")
    norm = Norm(model_util.upload(device, scale), 1e-5, normed)
    row_parallel = ScaledMatrix(
        mine[1], all_gather=FixedAllGather(device, (products[0], products[2]))
    )
    kernels.products.linear(
        lane, mine[0], row_parallel, out, residual=out, copy_to=(tap, 10), norm=norm
    )
    expected = ((products[0] + products[1]) + products[2]) + residual
    assert model_util.same_bits(model_util.download(stream, out), expected)
    assert model_util.same_bits(tap.to_host()[:, 10:], expected)
    kernels.norms.rms_norm(lane, out, norm.weight, norm.eps, again)
    assert model_util.same_bits(model_util.download(stream, again), normed.to_host())
    np.testing.assert_allclose(expected, x @ weight.T + residual, atol=2e-5)


def test_nccl_all_gather_runs_on_streams_and_in_graphs(device, stream, monkeypatch):
    """`NcclAllGather` runs on a stream and, as a child graph, in a CUDA graph.

    If nccl4py is not installed, the error names the package.
    """
    ranks = types.SimpleNamespace(rank=0, size=1, peers=(), deadline_s=30.0, send=lambda *_: None)
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(OptionError, match="needs NCCL: pip install 'nccl4py"):
        NcclAllGather(device, ranks, 6)

    class Communicator:
        @staticmethod
        def init(*_):
            return Communicator()

        def allgather(self, own, everyones, stream):
            call(cu.cuMemcpyDtoDAsync, everyones.ptr, own.ptr, own.nbytes, stream)

    core = types.SimpleNamespace(
        Communicator=Communicator,
        get_unique_id=lambda: bytes(128),
        UniqueId=types.SimpleNamespace(from_bytes=bytes),
    )
    monkeypatch.setitem(sys.modules, "nccl", types.SimpleNamespace(core=core))
    gather = NcclAllGather(device, ranks, 6)
    gather.connect()
    own = gather.local_buffer(2, 3)
    graph = Graph(device, "round")
    replayed = gather.all_gather(graph.lane("model"), own)
    values = np.ones((2, 3), np.float32)
    execution = graph.instantiate()
    for run in (
        lambda: gather.all_gather(StreamLane(stream), own),
        lambda: execution.launch(stream),
    ):
        own.copy_from(values := values + 1)
        run()
        np.testing.assert_array_equal(model_util.download(stream, replayed)[0], values)


def test_tensor_parallel_outputs_are_equal_for_every_batch_and_order():
    """The outputs of an engine on two ranks do not depend on batch size, order or draft shape.

    The outputs equal those of one process up to rounding. Requests use greedy and coupled sampling.
    Only rank 0 computes masks. A rank that cannot load its shard reports the error to rank 0, and
    the next engine works.
    """
    code, said, errors = run_ranks("equal")
    assert code == 0, errors
    found = json.loads(said)
    assert found["refused"] == ["EngineError", "rank 1: a file is missing here"]
    alone = found["alone"]
    first = found["ranks"][0]
    for other in found["ranks"][1:]:
        assert (other["tokens"], other["logprobs"]) == (first["tokens"], first["logprobs"])
    assert set(first["reasons"].values()) <= {"stop", "length"}
    # After a request has finished, rounds that are already in flight still fill its mask rows. The
    # number of such fills depends on timing.
    assert 0 < first["fills"] < 1.2 * alone["fills"]
    for name, logprobs in alone["logprobs"].items():
        pairs = zip(alone["tokens"][name], first["tokens"][name], strict=False)
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        until = max(len(list(equal)), 1)
        got = first["logprobs"][name]
        np.testing.assert_allclose(got[:until], logprobs[:until], atol=1e-3)


@pytest.mark.overlap
@pytest.mark.parametrize("is_replayed", [0, 1], ids=["stream", "graph"])
def test_worker_rank_reports_forward_pass_that_exceeds_deadline(
    device, stream, monkeypatch, is_replayed
):
    """A worker rank does not wait longer than the deadline for a collective of a lost rank."""
    release = threading.Event()
    worker = object.__new__(worker_rank.TensorParallelWorker)
    worker._device = device
    worker._stream = stream
    worker._graphs = {}
    worker._payload = device.pinned((1,), "int32")
    worker._ranks = types.SimpleNamespace(
        rank=1, deadline_s=60.0, keep_alive=lambda _: None, receive=lambda *_, **__: None
    )
    worker.all_gather = types.SimpleNamespace(forward_limit_s=0.2)
    task = worker_rank._Task([device.zeros((1,), "int32")], lambda lane: lane.host(release.wait))
    monkeypatch.setattr(worker, "_task", lambda *_: task)
    header = (worker_rank.Command.FORWARD, 1, 1, 0, 0, 0, 0, is_replayed)
    try:
        with pytest.raises(DeadlineError, match=r"rank 1: .* did not finish within 0\.2 s"):
            worker.run(header)
    finally:
        release.set()
        stream.synchronize(30)
        for _, executable in worker._graphs.values():
            executable.synchronize(30)


def test_nccl_connection_has_deadline(device, monkeypatch):
    """connect() raises an error if the other ranks do not create the communicator in time."""
    release = threading.Event()
    core = types.SimpleNamespace(
        Communicator=types.SimpleNamespace(init=lambda *_: release.wait()),
        get_unique_id=lambda: bytes(128),
        UniqueId=types.SimpleNamespace(from_bytes=bytes),
    )
    monkeypatch.setitem(sys.modules, "nccl", types.SimpleNamespace(core=core))
    ranks = types.SimpleNamespace(rank=0, size=2, peers=(1,), deadline_s=0.2, send=lambda *_: None)
    gather = NcclAllGather(device, ranks, 6)
    assert gather.forward_limit_s == 0.2
    with pytest.raises(DeadlineError, match=r"rank 0: .*NCCL.* within 0\.2 s"):
        gather.connect()
    release.set()


@pytest.mark.full
def test_tensor_parallel_outputs_are_equal_for_real_model():
    """SmolLM2 has the same outputs on two ranks, one of which has two of its three KV heads."""
    if not cache_folder().is_dir():
        pytest.skip(f"{cache_folder()} is not there: graft demo --llm makes it")
    code, said, errors = run_ranks("real")
    assert code == 0, errors
    first, second = json.loads(said)
    assert (first["tokens"], first["logprobs"]) == (second["tokens"], second["logprobs"])
    assert sum(map(len, first["tokens"].values())) > 10


def test_tensor_parallel_rank_timeout_ends_all_processes():
    """If a rank does not answer in time, all processes exit.

    One line on stderr names the rank and the time limit.
    """
    code, said, errors = run_ranks("late")
    told = [line for line in errors.splitlines() if line.startswith("graft:")]
    # The launcher may print that it had to end the other rank.
    assert code != 0 and "tokens" not in said
    assert len(told) == 1 and re.search(r"rank 1 did not answer within 2 s$", told[0]), errors


def test_worker_rank_exits_if_idle_rank_0_is_killed(tmp_path):
    """A worker rank that is idle ends at the deadline after the last heartbeat of rank 0."""
    path = tmp_path / "told"
    code, _, _ = run_ranks("idle", path, alone=True)
    text = path.read_text()
    assert code != 0 and re.fullmatch(r"graft: rank 1: rank 0 did not answer within 2 s\n", text)


@pytest.mark.full
def test_tensor_parallel_killed_rank_ends_all_processes(tmp_path):
    """If a rank is killed, all processes exit.

    If the launcher terminates the other ranks, they exit immediately without a message. Otherwise
    they exit at the deadline with one line on stderr.
    """
    code, _, _ = run_ranks("killed", tmp_path / "told", alone=True)
    limit = time.monotonic() + 60
    while not (text := (tmp_path / "told").read_text()).endswith("\n"):
        assert time.monotonic() < limit, text
        time.sleep(0.1)
    assert code != 0 and re.fullmatch(r"graft: .* rank 1 did not answer within 2 s\n", text)
    code, _, _ = run_ranks("killed", tmp_path / "untold")
    assert code != 0 and (tmp_path / "untold").read_text() == ""
