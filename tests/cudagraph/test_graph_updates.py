"""Changing an executable: kernel nodes, payload cells."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from cudagraph_util import replay

from graft import native
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import KernelError, OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import PythonWork
from graft.native import _native

TEXT = """
extern "C" __global__ void add(int* data, int value) { data[threadIdx.x] += value; }
extern "C" __global__ void scale(int* data, int value) { data[threadIdx.x] *= value; }
"""


def test_nodes_change_for_later_launches(device: Device, stream: Stream, module) -> None:
    """A kernel node takes another function, grid and operands, by name or Node."""
    a, b = device.zeros((4,), "int32"), device.from_host(np.ones(4, np.int32))
    graph = Graph(device, "changing")
    graph.lane("main").kernel(module["add"], 1, 4, [a, 3], name="work")
    executable = graph.instantiate()
    executable.launch(stream)
    executable.update_kernel("work", module["add"], 1, 2, [a, 10])
    executable.launch(stream)
    executable.update_kernel(graph.nodes[0], module["scale"], 1, 2, [b, 2])
    replay(executable, stream)
    assert a.to_host().tolist() == [13, 13, 3, 3] and b.to_host().tolist() == [2, 2, 1, 1]


def test_changed_operands_live_until_replaced(device: Device, stream: Stream, module) -> None:
    """New operands are kept by the executable; replaced ones go, so that changes weigh nothing."""
    data = device.zeros((4,), "int32")
    graph = Graph(device, "kept")
    graph.lane("main").kernel(module["add"], 1, 4, [data, 1], name="work")
    executable = graph.instantiate()
    _native.flush(5.0)
    before = native.live_resources()
    for i in range(300):
        fresh = device.pinned((4,), "int32")
        seen, fresh.array[:] = fresh.array, i
        executable.update_kernel("work", module["add"], 1, 4, [fresh, 1])
        del fresh
        executable.launch(stream)
    executable.synchronize(60)
    assert seen.tolist() == [300] * 4
    del seen
    executable.update_kernel("work", module["add"], 1, 4, [data, 1])
    gc.collect()
    _native.flush(5.0)
    assert native.live_resources() <= before
    executable.close()


def test_a_closed_executable_keeps_operands_in_flight(device: Device, module) -> None:
    """Operands of a changed node outlive everything while a launch that uses them runs."""
    stream = device.stream("slow")
    gate = threading.Event()
    data, fresh = device.zeros((4,), "int32"), device.pinned((4,), "int32")
    seen = fresh.array
    graph = Graph(device, "flight")
    lane = graph.lane("main")
    lane.host(lambda: gate.wait(30))
    lane.kernel(module["add"], 1, 4, [data, 1], name="work")
    executable = graph.instantiate()
    executable.update_kernel("work", module["add"], 1, 4, [fresh, 7])
    executable.launch(stream)
    executable.close()
    del executable, graph, lane, fresh, data
    gc.collect()
    gate.set()
    stream.synchronize(60)
    assert seen.tolist() == [7] * 4
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
    replay(executable, stream)
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
    with pytest.raises(OptionError, match=r"fill node 'elsewhere'.*only kernel nodes"):
        executable.set_enabled("elsewhere", False, within=other)
    with pytest.raises(KernelError, match="2 arguments"):
        executable.update_kernel(graph.nodes[0], module["add"], 1, 1, [data])
    replay(executable, stream)
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
    replay(graph, stream)
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


def test_priorities_are_accepted(device: Device, stream: Stream, module) -> None:
    """Kernel nodes with priorities compute as before in an executable that honours them."""
    data = device.zeros((1,), "int32")
    graph = Graph(device, "priorities")
    graph.lane("main").kernel(module["add"], 1, 1, [data, 4], priority=-1)
    executable = graph.instantiate(priorities=True)
    executable.launch(stream)
    executable.synchronize(60)
    assert data.to_host()[0] == 4
