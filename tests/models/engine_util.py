"""What the engine's tests share: the demo model and requests made from its tasks."""

import functools
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from graft.cudagraph.device import Device
from graft.models.engine.engine import Engine
from graft.models.request import Event, Output, Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo_tasks import Task, held_out_tasks, unseen_key_tasks

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGET = DEMO / "target"
DRAFTER = DEMO / "eagle3"
ROUND = "models/round/kernels/round.cu"
#: What `swap_text` makes of it: all drafts of one request come before another's, by position.
UNEVEN = (
    "const float reach = slot.reach[j - 1];",
    "const float reach = 1.0f / ((slot.n + b) % 3 + 1);",
)


def demo_engine(*, speculation: bool = True, drafter: Any = DRAFTER, **options: Any) -> Engine:
    """An engine on the shipped model, with its drafter, another or none."""
    return Engine(TARGET, drafter if speculation else None, **options)


def swap_text(monkeypatch: pytest.MonkeyPatch, folder: Path, path: str, old: str, new: str) -> None:
    """From now on load kernels of the file `path`, or all beside a header, with a text, which it
    has once, replaced."""
    plain = Device.load
    changed = Path(path)

    @functools.cache  # one text is compiled once
    def swapped(room: Path) -> Path:
        copy = shutil.copytree(room, Path(mkdtemp(dir=folder), changed.parent))
        text = (copy / changed.name).read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
        (copy / changed.name).write_text(text.replace(old, new))
        return copy

    def load(device: Device, source: Path, defines: Any = None) -> Any:
        beside = str(source.parent).endswith(str(changed.parent))
        if beside and (source.name == changed.name or changed.suffix == ".cuh"):
            source = swapped(source.parent) / source.name
        return plain(device, source, defines)

    monkeypatch.setattr(Device, "load", load)


class Given:
    """Draft lengths of rounds as they are given, in place of a budget; checks what it is told of
    acceptance."""

    def __init__(self, lengths: Iterable[int]):
        self._lengths = iter(lengths)

    def choose(self, size: int, requests: Any) -> int:
        return next(self._lengths)

    def brought(
        self, request: Any, size: int, length: int, made: int, known: int, accepted: int
    ) -> None:
        assert accepted <= known <= made and accepted <= size * length


def task_request(task: Task, **options: Any) -> Request:
    """The request that asks for a task's answer."""
    return Request(prompt=task.text, grammar=task_grammar(task), **({"max_tokens": 160} | options))


def outputs(events: Iterable[Event]) -> dict[str, Output]:
    """Outputs among events, by id."""
    return {event.id: event.output for event in events if event.output is not None}


def drain(engine: Engine) -> dict[str, Output]:
    """Step until nothing is left to do; the outputs that came."""
    found: dict[str, Output] = {}
    while engine.busy:
        found |= outputs(engine.step())
    return found


def mixed_requests(count: int, seed: int = 7, **options: Any) -> list[Request]:
    """Requests of the kinds the model knows, two thirds with keys it has seen in training."""
    known = list(held_out_tasks(count, seed))
    unseen = list(unseen_key_tasks(count, seed))
    tasks = [unseen[i] if i % 3 == 2 else known[i] for i in range(count)]
    return [task_request(task, **options) for task in tasks]
