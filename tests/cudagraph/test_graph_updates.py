"""Changing an executable: nodes, payload cells, copies of graphs."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import HostWorkError, KernelError, OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import PythonWork
from graft.cudagraph.kernels import load_text
from graft.native import _native

TEXT = """
extern "C" __global__ void add(int* data, int value) { data[threadIdx.x] += value; }
extern "C" __global__ void scale(int* data, int value) { data[threadIdx.x] *= value; }
"""


@pytest.fixture(scope="module")
def module(device: Device):
    """Kernels add and scale."""
    return load_text(device, TEXT, "updates.cu")


def test_nodes_change_for_later_launches(device: Device, stream: Stream, module) -> None:
    """Kernel, copy and fill nodes take new functions, operands and values, by name or Node."""
    a, b = device.zeros((4,), "int32"), device.zeros((4,), "int32")
    x, y = device.pinned((4,), "int32"), device.pinned((4,), "int32")
    graph = Graph(device, "changing")
    lane = graph.lane("main")
    lane.fill(a, 0, name="clear")
    lane.kernel(module["add"], 1, 4, [a, 3], name="work")
    lane.copy(x, a, name="out")
    executable = graph.instantiate()
    executable.launch(stream)
    executable.synchronize(60)
    assert x.array.tolist() == [3] * 4
    executable.update_fill("clear", b, 1)
    executable.update_kernel(graph.nodes[1], module["scale"], 1, 2, [b, 2])
    executable.update_copy("out", y, b)
    executable.launch(stream)
    executable.synchronize(60)
    ones = 0x01010101
    assert y.array.tolist() == [2 * ones, 2 * ones, ones, ones] and x.array.tolist() == [3] * 4


def test_changed_operands_live_until_replaced(device: Device, stream: Stream, module) -> None:
    """New operands are kept by the executable; replaced ones go, so that changes weigh nothing."""
    result = device.pinned((4,), "int32")
    seen = result.array
    data = device.zeros((4,), "int32")
    graph = Graph(device, "kept")
    lane = graph.lane("main")
    lane.kernel(module["add"], 1, 4, [data, 1], name="work")
    lane.copy(result, data, name="out")
    executable = graph.instantiate()
    _native.flush(5.0)
    before = native.live_resources()
    for i in range(300):
        fresh = device.from_host(np.full(4, i, np.int32))
        executable.update_kernel("work", module["add"], 1, 4, [fresh, 1])
        executable.update_copy("out", result, fresh)
        del fresh
        executable.launch(stream)
    executable.synchronize(60)
    assert seen.tolist() == [300] * 4
    executable.update_kernel("work", module["add"], 1, 4, [data, 1])
    executable.update_copy("out", result, data)
    gc.collect()
    _native.flush(5.0)
    assert native.live_resources() <= before
    executable.close()


def test_a_closed_executable_keeps_operands_in_flight(device: Device, module) -> None:
    """Operands of a changed node outlive everything while a launch that uses them runs."""
    stream = device.stream("slow")
    gate = threading.Event()
    data, fresh = device.zeros((4,), "int32"), device.from_host(np.arange(4, dtype=np.int32))
    result = device.pinned((4,), "int32")
    seen = result.array
    graph = Graph(device, "flight")
    lane = graph.lane("main")
    lane.host(lambda: gate.wait(30))
    lane.copy(result, data, name="out")
    executable = graph.instantiate()
    executable.update_copy("out", result, fresh)
    executable.launch(stream)
    executable.close()
    del executable, graph, lane, fresh, data, result
    gc.collect()
    gate.set()
    stream.synchronize(60)
    assert seen.tolist() == [0, 1, 2, 3]
    stream.close()


def test_disabled_nodes_do_nothing(device: Device, stream: Stream, module) -> None:
    """A disabled kernel is skipped, order around it stays; host steps have no switch."""
    data = device.zeros((1,), "int32")
    graph = Graph(device, "switch")
    lane = graph.lane("main")
    lane.kernel(module["add"], 1, 1, [data, 1], name="one")
    lane.kernel(module["add"], 1, 1, [data, 10], name="ten")
    lane.host(list, name="masks")
    executable = graph.instantiate()
    executable.set_enabled("one", False)
    assert not executable.is_enabled("one") and executable.is_enabled("ten")
    executable.launch(stream)
    executable.set_enabled("one", True)
    executable.launch(stream)
    executable.synchronize(60)
    assert data.to_host()[0] == 21
    with pytest.raises(OptionError, match=r"host node 'masks'.*'switch'"):
        executable.set_enabled("masks", False)


def test_wrong_changes_are_refused(device: Device, stream: Stream, module) -> None:
    """Unknown, ambiguous and foreign nodes, wrong kinds and arguments change nothing."""
    data = device.zeros((1,), "int32")
    graph, other = Graph(device, "mine"), Graph(device, "other")
    for _ in range(2):
        graph.lane("main").kernel(module["add"], 1, 1, [data, 1])
    other.lane("main").fill(data, name="elsewhere")
    executable = graph.instantiate()
    with pytest.raises(OptionError, match="2 nodes called 'add'"):
        executable.update_kernel("add", module["add"], 1, 1, [data, 5])
    with pytest.raises(OptionError, match="0 nodes called"):
        executable.set_enabled("nothing", False)
    with pytest.raises(OptionError, match="no node of graph 'mine'"):
        executable.set_enabled(other.nodes[0], False)
    with pytest.raises(OptionError, match=r"kernel node 'add'.*copy nodes only"):
        executable.update_copy(graph.nodes[0], data, data)
    with pytest.raises(KernelError, match="2 arguments"):
        executable.update_kernel(graph.nodes[0], module["add"], 1, 1, [data])
    executable.launch(stream)
    executable.synchronize(60)
    assert data.to_host()[0] == 2


def test_cells_give_each_replay_its_value(device: Device, stream: Stream) -> None:
    """A replay sees what was set before its launch, however late it runs."""
    gate = threading.Event()
    seen: list[tuple[object, str]] = []
    graph = Graph(device, "cells")
    cell = graph.cell("first", name="payload")
    lane = graph.lane("main")
    lane.host(lambda: gate.wait(30))
    lane.host(PythonWork(lambda value, tag: seen.append((value, tag)), "x"), cell=cell)
    lane.host(lambda value: seen.append((value, "y")), cell=cell)
    executable = graph.instantiate()
    executable.launch(stream)
    for value in ("second", "third"):
        executable.set(cell, value)
        executable.launch(stream)
    executable.launch(stream)
    assert cell.held == 3
    gate.set()
    executable.synchronize(60)
    assert [v for v, tag in seen if tag == "x"] == ["first", "second", "third", "third"]
    assert [v for v, tag in seen if tag == "y"] == ["first", "second", "third", "third"]
    assert cell.held == 1
    executable.close()
    seen.clear()
    again = graph.instantiate()
    again.launch(stream)
    again.synchronize(60)
    assert seen == [("third", "x"), ("third", "y")]


def test_a_cell_serves_its_own_graph_only(device: Device) -> None:
    """A cell of another graph is refused by both names."""
    graph, other = Graph(device, "one"), Graph(device, "other")
    cell = graph.cell()
    with pytest.raises(OptionError, match=r"'cell'.*'other'"):
        other.lane("main").host(print, cell=cell)


def test_native_work_gets_the_cells_address(device: Device, stream: Stream) -> None:
    """Native work is called with the address of the cell's pinned memory."""
    import ctypes

    from graft.cudagraph.hostwork import NativeWork

    seen: list[int] = []
    fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda p: seen.append(ctypes.c_int.from_address(p).value)
    )
    address = ctypes.cast(fn, ctypes.c_void_p).value
    assert address is not None
    values = [device.pinned((1,), "int32") for _ in range(3)]
    for i, pinned in enumerate(values):
        pinned.array[0] = 10 * i
    graph = Graph(device, "native")
    cell = graph.cell(values[0])
    graph.lane("main").host(NativeWork(address, keep=fn), cell=cell)
    executable = graph.instantiate()
    for pinned in values:
        executable.set(cell, pinned)
        executable.launch(stream)
    executable.synchronize(60)
    assert seen == [0, 10, 20]


def test_clones_and_children_are_their_own(device: Device, stream: Stream, module) -> None:
    """A clone outlives its original, counts its own replays and fails alone."""
    calls: list[str] = []
    fail = {"clone": False}
    data = device.zeros((1,), "int32")
    graph = Graph(device, "original")
    lane, side = graph.lane("main"), graph.lane("side")
    lane.kernel(module["add"], 1, 1, [data, 1])
    side.wait(lane.record())
    side.host(lambda: 1 / 0 if fail["clone"] else calls.append("step"), name="step")
    lane.wait(side.record())
    lane.kernel(module["scale"], 1, 1, [data, 2])
    copy = graph.clone()
    assert copy.edges == graph.edges and copy.nodes == graph.nodes
    assert copy.name == "original copy"
    first, second = graph.instantiate(), copy.instantiate()
    first.launch(stream)
    first.synchronize(60)
    first.close()
    graph.close()
    del graph, lane, side
    gc.collect()
    second.launch(stream)
    second.synchronize(60)
    assert data.to_host()[0] == 6 and calls == ["step"] * 2 and second.launches == 1
    parent = Graph(device, "parent")
    parent.add_child(copy, lane="a", name="inner")
    parent.lane("a").host(lambda: calls.append("after"))
    whole = parent.clone().instantiate()
    whole.launch(stream)
    whole.synchronize(60)
    assert calls == ["step"] * 3 + ["after"] and data.to_host()[0] == 14
    fail["clone"] = True
    whole.launch(stream)
    with pytest.raises(HostWorkError, match=r"'step'.*'parent copy'.*replay 2"):
        whole.synchronize(60)
    second.check()
    assert calls[-1] == "after" and len(calls) == 4


def test_priorities_are_accepted(device: Device, stream: Stream, module) -> None:
    """Kernel nodes with priorities compute as before in an executable that honours them."""
    data = device.zeros((1,), "int32")
    graph = Graph(device, "priorities")
    graph.lane("main").kernel(module["add"], 1, 1, [data, 4], priority=-1)
    executable = graph.instantiate(priorities=True)
    executable.launch(stream)
    executable.synchronize(60)
    assert data.to_host()[0] == 4
