"""Grammar transports: graph nodes, automatic choice, probes and deadlines.

A transport is the mechanism by which the graph of a round runs grammar steps on the CPU.
"""

import os
import shutil
import threading

import pytest
from engine_util import demo_engine, mixed_requests

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.errors import HostWorkError, OptionError
from graft.cudagraph.host import transports
from graft.cudagraph.host.transports import choose_transport, probe_transport
from graft.grammar.decoder import GuidedDecoder
from graft.models.round.prefill import CHUNK_SIZES
from graft.native import _native


@pytest.mark.parametrize("transport", ["mailbox", "spinkernel"])
def test_grammar_transport_uses_no_host_nodes(device, transport):
    """With the transports "mailbox" and "spinkernel", no graph has a host node.

    The nodes of the transport and the kernels that copy mask rows have a higher priority than the
    model's kernels. Most model kernels are connected by edges for programmatic dependent launch,
    which is the default on devices that support it.
    """
    priority = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    use_priority = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
    kernels = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    _, first = call(cu.cuCtxGetStreamPriorityRange)
    with demo_engine(max_batch_size=2, grammar_transport=transport) as engine:
        for round_graph in engine.graphs.values():
            graph = round_graph.graphs[0]
            flags = int(call(cu.cuGraphExecGetFlags, round_graph.execs[0].handle))
            assert flags == use_priority
            handles = call(cu.cuGraphGetNodes, graph.handle, 999)[0]
            nodes = dict(zip(map(int, handles), graph.nodes, strict=False))
            kinds = {node.kind for node in nodes.values()}
            assert {"request", "wait"} <= kinds <= {"request", "wait", "copy", "kernel"}
            assert "mask rows 0 to 0" in [node.name for node in nodes.values()]
            for handle, node in nodes.items():
                if call(cu.cuGraphNodeGetType, handle) == kernels:
                    value = call(cu.cuGraphKernelNodeGetAttribute, handle, priority)
                    assert value.priority == (0 if node.lane == "model" else first)
            sources, targets, data = call(cu.cuGraphGetEdges, graph.handle, 999)[:3]
            num_programmatic = 0
            for source, target, edge in zip(sources, targets, data, strict=True):
                if not int(edge.type):
                    continue
                num_programmatic += 1
                for handle in (source, target):
                    node = nodes[int(handle)]
                    assert (node.kind, node.lane) == ("kernel", "model")
            assert num_programmatic > 8 * engine._resources.target.config.num_hidden_layers
        prefill = engine._built.prefill
        prefill._graph(CHUNK_SIZES[0])
        graph, _ = prefill._graphs[CHUNK_SIZES[0]]
        edge_data = call(cu.cuGraphGetEdges, graph.handle, 999)[2]
        assert any(int(edge.type) for edge in edge_data)


def test_grammar_transport_auto_depends_on_cores_and_probes(device, monkeypatch):
    """ "auto" selects host nodes below four cores, and otherwise the first transport that works."""
    monkeypatch.setattr(transports, "usable_cores", lambda: 3)
    assert choose_transport("auto", device)[0] == "native"
    assert "3 usable cores" in choose_transport("auto", device)[1]
    monkeypatch.setattr(transports, "usable_cores", lambda: 4)
    answers = {"mailbox": "", "spinkernel": ""}
    monkeypatch.setattr(transports, "transport_problem", lambda t, device: answers[t])
    assert choose_transport("auto", device)[0] == "mailbox"
    answers["mailbox"] = "no memory operations"
    chosen, why = choose_transport("auto", device)
    assert chosen == "spinkernel" and "no memory operations" in why
    answers["spinkernel"] = "no kernels"
    assert choose_transport("auto", device)[0] == "native"
    with pytest.raises(OptionError, match="no memory operations"):
        choose_transport("mailbox", device)
    with pytest.raises(OptionError, match="carrier pigeon"):
        choose_transport("carrier pigeon", device)
    assert choose_transport("native", device)[0] == "native"


def test_grammar_transport_probe_reports_missing_features(monkeypatch):
    """`probe_transport` returns the driver error if a transport fails, and otherwise ""."""
    probe_transport.cache_clear()
    assert probe_transport("mailbox", "soft") == ""
    probe_transport.cache_clear()
    monkeypatch.setitem(os.environ, "SOFTCUDA_MEMOPS", "0")
    assert "NOT_SUPPORTED" in probe_transport("mailbox", "soft")
    probe_transport.cache_clear()


@pytest.fixture
def probe_answers(monkeypatch, tmp_path):
    """Answers of the probes by transport. The cache is empty, and no probe runs."""
    answers = {"mailbox": "", "spinkernel": ""}
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transports, "probe_transport", lambda name, kind, ordinal: answers[name])
    return answers


def test_successful_probe_is_remembered(device, monkeypatch, tmp_path, probe_answers):
    """A failure is not remembered, because its reason may be temporary."""
    probe_answers["spinkernel"] = "too slow"
    assert transports.transport_problem("mailbox", device) == ""
    assert transports.transport_problem("spinkernel", device) == "too slow"
    probe_answers |= {"mailbox": "it waits forever", "spinkernel": ""}
    monkeypatch.setenv("CUDA_LOG_FILE", str(tmp_path / "log"))
    assert transports.transport_problem("mailbox", device) == ""
    assert transports.transport_problem("spinkernel", device) == ""


@pytest.mark.parametrize(
    "condition",
    [
        *("CUDA_LAUNCH_BLOCKING", "SOFTCUDA_MEMOPS", "LD_PRELOAD", "NV_TPS_LAUNCH_TOKEN"),
        *("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "CUPTI_INJECTION64_PATH"),
        *("mailbox.cu", "graft.cuh", "libcuda.so.1", "probe"),
    ],
)
def test_probe_is_repeated_under_other_conditions(
    device, monkeypatch, tmp_path, probe_answers, condition
):
    """The conditions are environment variables, kernels, the driver and the probe itself."""
    kernels = tmp_path / "kernels"
    shutil.copytree(transports.KERNELS, kernels)
    monkeypatch.setattr(transports, "KERNELS", kernels)
    assert transports.transport_problem("mailbox", device) == ""
    probe_answers["mailbox"] = "it waits forever"
    assert transports.transport_problem("mailbox", device) == ""
    if condition == "libcuda.so.1":
        library = tmp_path / condition
        library.write_text("an updated driver of the same version")
        monkeypatch.setattr(_native, "loaded_library", {condition: str(library)}.get)
    elif condition == "probe":
        monkeypatch.setattr(transports, "_PROBE", "another program")
    elif condition.isupper():
        monkeypatch.setenv(condition, "1")
    else:
        with (kernels / condition).open("a") as source:
            source.write("// changed")
    assert transports.transport_problem("mailbox", device) == "it waits forever"


def test_mailbox_deadline_fails_engine_with_name_of_late_step(monkeypatch):
    """If a grammar step never completes, the engine fails after the deadline.

    The error contains the name of the step.
    """
    block = threading.Event()
    resume = threading.Event()
    original = GuidedDecoder.commit_work

    def commit_work(self):
        work = original(self)
        if self.transport != "mailbox":
            return work

        def late_step() -> None:
            if block.is_set():
                resume.wait(20.0)

        return late_step

    monkeypatch.setattr(GuidedDecoder, "commit_work", commit_work)
    monkeypatch.setattr(
        GuidedDecoder.__init__,
        "__kwdefaults__",
        {**GuidedDecoder.__init__.__kwdefaults__, "deadline_s": 0.3},
    )
    engine = demo_engine(max_batch_size=1, grammar_transport="mailbox")
    try:
        block.set()
        with pytest.raises(HostWorkError, match=r"no answer within 0\.3 s") as failed:
            engine.generate(mixed_requests(1, max_tokens=40))
        assert failed.value.node == "commit, fill row 0"
    finally:
        resume.set()
        engine.close()
