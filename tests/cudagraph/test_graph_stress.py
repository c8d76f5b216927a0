"""Random graphs of every kind of node, driven at random, against a sequential model.

The same in C++, under sanitizers, is ``test_sanitize.py``; this one goes through the Python layer:
lanes, marks, payload cells, mailboxes, moves, updates, failures, drops.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from graft.cudagraph import Device, Graph, GraphLane, HostWorkError, KernelModule, Stream
from graft.cudagraph.conditional import condition, if_else, while_
from graft.cudagraph.mailbox import MailboxWorker

LIMIT_S = 120.0
TEXT = """
#include "conditional.cuh"
extern "C" __global__ void mix(unsigned* cells, int out, int a, int b, unsigned salt) {
  cells[out] = cells[out] * 31u + cells[a] * 17u + cells[b] * 13u + salt;
}
extern "C" __global__ void decide(unsigned long long condition, const unsigned* cells, int a,
                                  unsigned cases) {
  cudaGraphSetConditional(condition, cells[a] % cases);
}
extern "C" __global__ void turn(unsigned long long condition, unsigned* turns, int place,
                                unsigned limit) {
  if (++turns[place] == limit) turns[place] = 0u;
  cudaGraphSetConditional(condition, turns[place]);
}
"""
MASK = 0xFFFFFFFF
HOST = ("host", "payload", "mailbox", "spin", "moved")
DEVICE = ("kernel", "branch", "loop", "child", "events")


@dataclass
class Op:
    """One step: cell `out` becomes a mix of itself, two earlier cells and a salt."""

    kind: str
    lane: int
    out: int
    a: int
    b: int
    salt: int
    waits: int | None = None  # the step of another lane that it comes after

    def mixed(self, cells: Any, salt: int) -> int:
        """What the cell becomes, in Python's integers."""
        own, a, b = (int(cells[i]) for i in (self.out, self.a, self.b))
        return (own * 31 + a * 17 + b * 13 + salt) & MASK

    def run(self, cells: list[int]) -> None:
        """The model."""
        value = cells[self.a]
        if self.kind == "branch":
            cells[self.out] = self.mixed(cells, self.salt if value % 2 else self.salt + 1)
        elif self.kind == "loop":
            for _ in range(1 + self.salt % 3):
                cells[self.out] = self.mixed(cells, self.salt)
        else:
            cells[self.out] = self.mixed(cells, self.salt)


class Case:
    """A random graph on the device, and the same as a list of steps."""

    def __init__(self, device: Device, stream: Stream, module: KernelModule, seed: int) -> None:
        self.device, self.stream, self.module = device, stream, module
        self.rng = random.Random(seed)
        self.chain = self.rng.random() < 0.4  # then it is known what a failure stops
        self.ops = self.random_ops()
        self.cells = device.pinned((len(self.ops),), "uint32")
        self.turns = device.zeros((len(self.ops),), "uint32")
        self.wanted = [0] * len(self.ops)
        self.worker = MailboxWorker(wait="park")
        self.event = device.event("stress")
        self.payloads: dict[int, Any] = {}
        self.fail = {"in": -1}

    def random_ops(self) -> list[Op]:
        ops: list[Op] = []
        before: list[set[int]] = []  # ancestors of each step
        last: dict[int, int] = {}
        for out in range(self.rng.randint(3, 14)):
            lane = 0 if self.chain else self.rng.randrange(3)
            known: set[int] = set()
            waits = None
            if lane in last:
                known |= before[last[lane]] | {last[lane]}
            if ops and not self.chain and self.rng.random() < 0.4:
                waits = self.rng.randrange(out)
                known |= before[waits] | {waits}
            a, b = (self.rng.choice([out, *known]) for _ in range(2))
            kind = self.rng.choice(HOST if self.rng.random() < 0.5 else DEVICE)
            ops.append(Op(kind, lane, out, a, b, self.rng.getrandbits(31), waits))
            before.append(known)
            last[lane] = out
        return ops

    # ---- building -----------------------------------------------------------------------------
    def work(self, op: Op) -> Callable[..., None]:
        """The host step of an op."""
        cells, fail, out = self.cells.array, self.fail, op.out

        def step(salt: int = op.salt) -> None:
            if fail["in"] == out:
                raise ValueError("told to fail")
            cells[out] = op.mixed(cells, salt)

        return step

    def mix(self, lane: Any, op: Op, more: int = 0) -> None:
        args = [self.cells, op.out, op.a, op.b, op.salt + more]
        lane.kernel(self.module["mix"], 1, 1, args)

    def build(self, name: str) -> Graph:
        graph = Graph(self.device, name)
        marks: list[Any] = []
        self.payloads.clear()
        for op in self.ops:
            lane = graph.lane(f"lane {op.lane}")
            if op.waits is not None:
                lane.wait(marks[op.waits])
            self.add(graph, lane, op)
            marks.append(lane.record())
        return graph

    def add(self, graph: Graph, lane: GraphLane, op: Op) -> None:
        title = f"step {op.out}"
        if op.kind == "host":
            lane.host(self.work(op), name=title)
        elif op.kind == "payload":
            self.payloads[op.out] = graph.cell(op.salt)
            lane.host(self.work(op), name=title, cell=self.payloads[op.out])
        elif op.kind in ("mailbox", "spin"):
            getattr(lane, op.kind)(self.work(op), name=title, worker=self.worker,
                                   deadline_s=LIMIT_S)  # fmt: skip
        elif op.kind in ("child", "moved"):
            inner = Graph(self.device, title)
            if op.kind == "child":
                self.mix(inner.lane("inner"), op)
            else:
                inner.lane("inner").mailbox(self.work(op), name=title, worker=self.worker,
                                            deadline_s=LIMIT_S)  # fmt: skip
            lane.child(inner)
        elif op.kind == "events":
            lane.wait_event(self.event)
            self.mix(lane, op)
            lane.record_event(self.event)
        elif op.kind == "kernel":
            self.mix(lane, op)
        else:
            self.conditional(graph, lane, op)

    def conditional(self, graph: Graph, lane: GraphLane, op: Op) -> None:
        if op.kind == "loop":
            more = condition(graph, 1)
            body = while_(lane, more).lane("body")
            self.mix(body, op)
            limit = 1 + op.salt % 3
            body.kernel(self.module["turn"], 1, 1, [more, self.turns, op.out, limit])
            return
        chosen = condition(graph)
        lane.kernel(self.module["decide"], 1, 1, [chosen, self.cells, op.a, 2])
        for more, body in enumerate(if_else(lane, chosen)):
            self.mix(body.lane("body"), op, more)

    # ---- driving ------------------------------------------------------------------------------
    def compare(self, run: Any) -> None:
        run.synchronize(LIMIT_S)
        assert self.cells.array.tolist() == self.wanted, [op.kind for op in self.ops]

    def launch(self, run: Any, times: int) -> None:
        for _ in range(times):
            for out, cell in self.payloads.items():
                if self.rng.random() < 0.5:
                    op = self.ops[out] = replace(self.ops[out], salt=self.rng.getrandbits(31))
                    run.set(cell, op.salt)
            run.launch(self.stream)
            for op in self.ops:
                op.run(self.wanted)

    def fail_once(self, run: Any) -> None:
        """One replay with a step that raises: later host steps stand down, then all is well."""
        hosts = [op for op in self.ops if op.kind in HOST]
        if not self.chain or not hosts:
            return
        self.compare(run)
        bad = self.rng.choice(hosts).out
        self.fail["in"] = bad
        run.launch(self.stream)
        with pytest.raises(HostWorkError, match="told to fail") as failed:
            run.synchronize(LIMIT_S)
        assert failed.value.node == f"step {bad}" and failed.value.replay == run.launches
        for op in self.ops:
            if op.kind not in HOST or op.out < bad:
                op.run(self.wanted)
        self.fail["in"] = -1
        run.clear(LIMIT_S)
        self.compare(run)

    def update(self, run: Any) -> Graph:
        self.ops = [replace(op, salt=self.rng.getrandbits(31)) for op in self.ops]
        graph = self.build("updated")
        run.update(graph)
        return graph

    def drive(self) -> None:
        graph = self.build("stress")
        run = graph.instantiate()
        for _ in range(self.rng.randint(3, 8)):
            choice = self.rng.randrange(5)
            if choice == 0:
                self.fail_once(run)
            elif choice == 1:
                graph = self.update(run)
            elif choice == 2:
                self.compare(run)
            else:
                self.launch(run, self.rng.randint(1, 4))
        self.launch(run, 2)
        if self.rng.random() < 0.5:  # dropped in flight
            del graph
            run.close()
            self.payloads.clear()
            gc.collect()
            self.stream.synchronize(LIMIT_S)
            assert self.cells.array.tolist() == self.wanted, [op.kind for op in self.ops]
        else:
            self.compare(run)
            run.close()


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(1000, 2500), marks=pytest.mark.full)]
)
def test_random_graphs_agree_with_a_sequential_model(
    device: Device, stream: Stream, module: KernelModule, seeds: range
) -> None:
    """Cells, failed steps and replay numbers are the model's; a failure is repeated by its seed."""
    for seed in seeds:
        try:
            Case(device, stream, module, seed).drive()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
