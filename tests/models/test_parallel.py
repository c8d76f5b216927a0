"""Several ranks hold one model: shares, sums in their order, equal outputs, ranks that are gone."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import nets_util as nets
import numpy as np
import pytest
from engine_util import TARGET

from graft.cudagraph.driver import call, cu
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.nccl import NcclAllGather
from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernel_library import ModelKernels, Norm
from graft.models.llm.sharding import Shard
from graft.models.llm.weights import ScaledMatrix
from graft.tools.smollm import cache_folder

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
    """What two ranks say and how they end; whatever they do, none of them is left behind. `alone`:
    their launcher knows only shells that run them, and ends none of them."""
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
def test_shares_of_all_ranks_are_the_whole_model(config, size, keys, inner):
    """Heads and columns are dealt out without gap or overlap, query heads with their key head."""
    shares = [Shard.of(config, rank, size) for rank in range(size)]
    assert [(s.kv_heads, s.mlp_columns) for s in shares] == list(zip(keys, inner, strict=True))
    group = config.num_attention_heads // config.num_key_value_heads
    assert all(
        s.local_config.num_attention_heads == group * s.local_config.num_key_value_heads
        for s in shares
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
        parts = [matrix[share.slices()[name]] for share in shares]
        np.testing.assert_array_equal(np.concatenate(parts, int(shape[0] == 7)), matrix)


def test_more_ranks_than_key_heads_are_refused():
    """A degree that does not fit is refused by its number and the model's."""
    with pytest.raises(OptionError, match="4 ranks are too many for a model with 3 KV heads"):
        Shard.of(SMOL, 0, 4)


class Given:
    """Sums of three ranks in one process: what the other two have is given."""

    def __init__(self, device, others):
        self.device = device
        self.others = others

    def local_buffer(self, rows, columns):
        return self.device.zeros((rows, columns), "float32")

    def all_gather(self, lane, own):
        lane.stream.synchronize()
        parts = [self.others[0], own.to_host(), self.others[1]]
        return self.device.from_host(np.stack(parts))


@pytest.mark.parametrize("form", nets.FORMS)
def test_partial_products_are_added_in_rank_order(device, stream, form):
    """A product with a part of a matrix is ((p0 + p1) + p2) + residual bit for bit, up to rounding
    the whole product, and so are its tap and its norm."""
    rng = np.random.default_rng(5)
    x, weight = (rng.standard_normal(shape, np.float32) for shape in ((5, 96), (40, 96)))
    residual = rng.standard_normal((5, 40), np.float32)
    scale = np.ones(40, np.float32)
    kernels = ModelKernels(device, form)
    lane = StreamLane(stream)
    products = []
    for i in range(3):
        out = device.zeros((5, 40), "float32")
        part = [nets.upload(device, a[:, 32 * i : 32 * i + 32]) for a in (x, weight)]
        kernels.linear(lane, part[0], part[1], out)
        products.append(nets.host(stream, out))
        if i == 1:
            mine = part
    out = nets.upload(device, residual)
    normed = device.zeros((5, 40), "float32")
    tap = device.zeros((5, 50), "float32")
    again = device.zeros((5, 40), "float32")
    norm = Norm(nets.upload(device, scale), 1e-5, normed)
    of_ranks = ScaledMatrix(mine[1], all_gather=Given(device, (products[0], products[2])))
    kernels.linear(lane, mine[0], of_ranks, out, residual=out, copy_to=(tap, 10), norm=norm)
    expected = ((products[0] + products[1]) + products[2]) + residual
    assert nets.same_bits(nets.host(stream, out), expected)
    assert nets.same_bits(tap.to_host()[:, 10:], expected)
    kernels.norm(lane, out, norm.weight, norm.eps, again)
    assert nets.same_bits(nets.host(stream, again), normed.to_host())
    np.testing.assert_allclose(expected, x @ weight.T + residual, atol=2e-5)


def test_nccl_is_captured_and_joined_as_a_child_graph(device, stream, monkeypatch):
    """What a communicator enqueues on the stream it is given runs on streams, and in every replay;
    without nccl4py the device is refused by the package's name."""
    ranks = types.SimpleNamespace(rank=0, size=1, peers=(), send=lambda *_: None)
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(OptionError, match="needs nccl4py"):
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
        np.testing.assert_array_equal(nets.host(stream, replayed)[0], values)


def test_two_ranks_give_equal_outputs_in_every_batch_and_order():
    """Greedy and coupled outputs of two ranks are the same in every batch, order and shape of
    drafts, and up to rounding those of one process; rank 0 alone computes masks, about as many as
    one process; a rank that cannot load says why to rank 0, and the next engine works."""
    code, said, errors = run_ranks("equal")
    assert code == 0, errors
    found = json.loads(said)
    assert found["refused"] == ["EngineError", "rank 1: a file is missing here"]
    alone = found["alone"]
    first = found["ranks"][0]
    for other in found["ranks"][1:]:
        assert (other["tokens"], other["logprobs"]) == (first["tokens"], first["logprobs"])
    assert set(first["reasons"].values()) <= {"stop", "length"}
    # Rounds in flight when a request ends fill some more, as time will have it.
    assert 0 < first["fills"] < 1.2 * alone["fills"]
    for name, logprobs in alone["logprobs"].items():
        same = [a == b for a, b in zip(alone["tokens"][name], first["tokens"][name], strict=False)]
        until = (same.index(False) if False in same else len(same)) or 1
        np.testing.assert_allclose(first["logprobs"][name][:until], logprobs[:until], atol=1e-3)


@pytest.mark.full
def test_two_ranks_of_a_real_model_give_equal_outputs():
    """SmolLM2's three key heads over two ranks: greedy and coupled outputs are the same in both
    batches and orders."""
    if not cache_folder().is_dir():
        pytest.skip(f"{cache_folder()} is not there: graft demo --llm makes it")
    code, said, errors = run_ranks("real")
    assert code == 0, errors
    first, second = json.loads(said)
    assert (first["tokens"], first["logprobs"]) == (second["tokens"], second["logprobs"])
    assert sum(map(len, first["tokens"].values())) > 10


def test_a_late_rank_ends_all_with_one_sentence():
    """A rank that is late by more than the deadline ends every process with one line that names it
    and the seconds."""
    code, said, errors = run_ranks("late")
    told = [line for line in errors.splitlines() if line.startswith("graft:")]
    assert code != 0 and not said.strip()
    assert len(told) == 1 and re.search(r"rank 1 did not answer within 4 s$", told[0]), errors


@pytest.mark.full
def test_a_killed_rank_ends_all(tmp_path):
    """Where a rank dies and the launcher ends nobody, the deadline does, with one line; where the
    launcher does, all are gone at once."""
    code, _, _ = run_ranks("killed", tmp_path / "told", alone=True)
    limit = time.monotonic() + 60
    while not (text := (tmp_path / "told").read_text()).endswith("\n"):
        assert time.monotonic() < limit, text
        time.sleep(0.1)
    assert code != 0 and re.fullmatch(r"graft: .* rank 1 did not answer within 4 s\n", text)
    code, _, _ = run_ranks("killed", tmp_path / "untold")
    assert code != 0 and (tmp_path / "untold").read_text() == ""
