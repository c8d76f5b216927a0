"""Child graphs: graphs with mailboxes, payloads and conditionals that are moved into a parent."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from cudagraph_util import LIMIT_S, Step, assert_raises, replay, wait_for_records, wait_until_freed

from graft.cudagraph import (
    Device,
    Graph,
    HostWorkError,
    MailboxWorker,
    OptionError,
    Stream,
    condition,
    if_,
)
from graft.cudagraph.graph import graph

TEXT = """
extern "C" __global__ void unless(const int* status, int* data) { if (!status[0]) *data += 1; }
"""


def test_child_graph_runs_mailboxes_in_parent(device: Device, stream: Stream) -> None:
    answers = [0]

    def work(out: np.ndarray) -> None:
        answers[0] += 1
        out[:] = answers[0]

    watch = weakref.ref(work)
    output = device.pinned((4,), "int32")
    result = device.zeros((4,), "int32")
    child = Graph(device, "child")
    lane = child.lane("grammar")
    lane.mailbox(work, output=output, worker=MailboxWorker())
    lane.copy(result, output)
    parent = Graph(device, "parent")
    before = Step()
    after = Step()
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
    count = wait_until_freed()
    gc.collect()
    wait_for_records(count)
    assert watch() is None


def test_child_graph_cannot_be_edited_or_moved_again(device: Device, stream: Stream) -> None:
    child = Graph(device, "small")
    parent = Graph(device, "large")
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
    busy = Graph(device, "busy")
    busy.lane("x").fill(device.zeros((1,), "int32"))
    run = busy.instantiate()
    assert_raises(
        OptionError,
        {
            r"'large'.*is the same graph": lambda: parent.lane("main").child(parent),
            r"'busy'.*open executable": lambda: parent.lane("main").child(busy),
            "'nonsense' is not a Graph": lambda: parent.lane("main").child("nonsense"),  # type: ignore
        },
    )
    run.close()


def test_child_graph_with_conditional_is_refused(device: Device) -> None:
    """CUDA forbids conditional nodes in child graphs. graft raises an error before CUDA does."""
    child = Graph(device, "child")
    if_(child.lane("x"), condition(child, 1), name="maybe")
    parent = Graph(device, "parent")
    with pytest.raises(OptionError, match=r"'child'.*'parent'.*conditional node 'maybe'"):
        parent.lane("main").child(child)
    assert parent.nodes == []


def test_child_graph_failure_fails_replay_of_parent(device: Device, stream: Stream, module) -> None:
    """A failure of a child graph is reported with the parent's replay number.

    The status words of both graphs contain the failure.
    """
    kernel = module["unless"]
    good = [device.zeros((1,), "int32") for _ in range(2)]
    fail = [False]
    calls = [0]

    def step(value: object) -> None:
        calls[0] += 1
        if fail[0]:
            raise ValueError(f"payload {value}")

    child = Graph(device, "child")
    payload = child.payload("first", name="payload")
    child.lane("x").host(step, name="inner", payload=payload)
    # The child's host step runs three times before the child is moved into the parent.
    early = child.instantiate()
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
    run.set_payload(payload, "second")
    run.launch(stream)
    with pytest.raises(HostWorkError, match="payload second") as failed:
        run.synchronize(LIMIT_S)
    assert (failed.value.node, failed.value.replay) == ("inner", 3)
    assert child.status.array[0] == parent.status.array[0] == 1
    assert [g.to_host()[0] for g in good] == [2, 2] and calls == [6]
    fail[0] = False
    run.clear(LIMIT_S)
    assert child.status.array[0] == parent.status.array[0] == 0
    replay(run, stream)
    assert [g.to_host()[0] for g in good] == [3, 3]


def test_child_graph_requires_cuda_12_9(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the driver is too old, the error says so and the child can still be launched."""
    step = Step()
    child = Graph(device, "child")
    parent = Graph(device, "parent")
    child.lane("x").host(step)
    with monkeypatch.context() as patch:
        patch.setattr(graph, "CHILD_MOVE_MIN_CUDA", 1 << 30)
        with pytest.raises(OptionError, match=r"'child' cannot be moved into 'parent'.*CUDA 12\.9"):
            parent.lane("main").child(child)
    replay(child, stream)
    assert step.calls == 1 and parent.nodes == []
