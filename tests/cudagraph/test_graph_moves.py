"""Child graphs, which are moved: mailboxes, conditionals, cells and all."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from cudagraph_util import Step, released, replay, settled

from graft.cudagraph import graph
from graft.cudagraph.conditional import condition, if_
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import HostWorkError, OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.mailbox import MailboxWorker

LIMIT_S = 60.0
TEXT = """
extern "C" __global__ void unless(const int* status, int* data) { if (!status[0]) *data += 1; }
"""


def test_a_moved_child_brings_mailboxes_and_conditionals(device: Device, stream: Stream) -> None:
    """A child's steps run in the parent, are answered there, and live with it."""
    answers = [0]

    def work(out: np.ndarray) -> None:
        answers[0] += 1
        out[:] = answers[0]

    watch = weakref.ref(work)
    output, result = device.pinned((4,), "int32"), device.zeros((4,), "int32")
    child = Graph(device, "child")
    lane = child.lane("grammar")
    lane.mailbox(work, output=output, worker=MailboxWorker())
    if_(lane, condition(child, 1), name="always").lane("inside").fill(result, 0)
    lane.copy(result, output)
    parent = Graph(device, "parent")
    before, after = Step(), Step()
    parent.lane("main").host(before)
    parent.lane("main").child(child, name="moved")
    parent.lane("main").host(after)
    run = parent.instantiate()
    del child, lane, parent, work, output
    gc.collect()
    for i in range(1, 21):
        replay(run, stream)
        assert result.to_host().tolist() == [i] * 4
    assert before.calls == after.calls == 20
    run.close()
    del run
    count = settled()
    gc.collect()
    released(count)
    assert watch() is None


def test_a_moved_child_belongs_to_its_parent(device: Device, stream: Stream) -> None:
    """Editing, instantiating or moving it again is refused by both names."""
    child, parent = Graph(device, "small"), Graph(device, "large")
    child.lane("x").fill(device.zeros((1,), "int32"))
    parent.lane("main").child(child)
    for attempt in (
        lambda: child.lane("x").host(print),
        child.instantiate,
        lambda: parent.lane("main").child(child),
        lambda: Graph(device, "third").lane("main").child(child),
    ):
        with pytest.raises(OptionError, match=r"'small'.*'large'"):
            attempt()
    with pytest.raises(OptionError, match=r"'large'.*holds that graph"):
        parent.lane("main").child(parent)
    busy = Graph(device, "busy")
    busy.lane("x").fill(device.zeros((1,), "int32"))
    run = busy.instantiate()
    with pytest.raises(OptionError, match=r"'busy'.*open executable"):
        parent.lane("main").child(busy)
    run.close()
    with pytest.raises(OptionError, match="'nonsense' is no Graph"):
        parent.lane("main").child("nonsense")  # type: ignore[arg-type]


def test_failures_and_replay_numbers_are_the_parents(
    device: Device, stream: Stream, module
) -> None:
    """A step of a moved child fails the parent's replay by its number; both statuses say so."""
    kernel = module["unless"]
    good = [device.zeros((1,), "int32") for _ in range(2)]
    fail, calls = [False], [0]

    def step(value: object) -> None:
        calls[0] += 1
        if fail[0]:
            raise ValueError(f"cell {value}")

    child = Graph(device, "child")
    cell = child.cell("first", name="payload")
    child.lane("x").host(step, name="inner", cell=cell)
    early = child.instantiate()  # it ran alone before: its records have counted
    replay(early, stream, 3)
    early.close()
    child.lane("x").kernel(kernel, 1, 1, [child.status, good[0]])
    parent = Graph(device, "parent")
    parent.lane("main").child(child)
    parent.lane("main").kernel(kernel, 1, 1, [parent.status, good[1]])
    run = parent.instantiate()
    run.launch(stream)
    replay(run, stream)
    fail[0] = True
    run.set(cell, "second")
    run.launch(stream)
    with pytest.raises(HostWorkError, match="cell second") as failed:
        run.synchronize(LIMIT_S)
    assert (failed.value.node, failed.value.replay) == ("inner", 3)
    assert child.status.array[0] == parent.status.array[0] == 1
    assert [g.to_host()[0] for g in good] == [2, 2] and calls == [6]
    fail[0] = False
    run.clear(LIMIT_S)
    assert child.status.array[0] == parent.status.array[0] == 0
    replay(run, stream)
    assert [g.to_host()[0] for g in good] == [3, 3]
    run.close()


def test_without_moves_a_child_is_refused(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older driver: refused by what it needs; the child is still its owner's and runs."""
    step = Step()
    child, parent = Graph(device, "child"), Graph(device, "parent")
    child.lane("x").host(step)
    with monkeypatch.context() as patch:
        patch.setattr(graph, "MOVES_SINCE", 1 << 30)
        with pytest.raises(OptionError, match=r"'child' cannot be moved into 'parent'.*CUDA 12\.9"):
            parent.lane("main").child(child)
    replay(child, stream)
    assert step.calls == 1 and parent.nodes == []
