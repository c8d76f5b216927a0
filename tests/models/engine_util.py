"""Helpers of the engine tests: engines and requests of the demo model."""

import functools
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from mutated_sources import write_sources

from graft.cudagraph.device import Device
from graft.models.engine.engine import Engine
from graft.models.engine.options import InternalOptions
from graft.models.request import Event, Output, Request
from graft.models.round.prefill import Prefill
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo.tasks import Task, held_out_tasks, unseen_key_tasks

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGET = DEMO / "target"
DRAFTER = DEMO / "eagle3"
ROUND = "models/round/kernels/round.cu"
#: Unconstrained request.
FREE = Request(tokens=[300, 301, 302], max_tokens=40)
#: Unconstrained request that generates `max_tokens` tokens.
LONG = Request(tokens=[300, 301, 302], max_tokens=1000, temperature=4.0, seed=1)
#: Text in the kernel file `ROUND`, and a replacement that assigns forward rows to the drafts of
#: arbitrary requests instead of the drafts most likely to be accepted.
UNEVEN_DRAFTS = (
    "const float accept_prob = slot.accept_prob[j - 1];",
    "const float accept_prob = 1.0f / ((slot.n + b) % 3 + 1);",
)


def demo_engine(*, speculation: bool = True, drafter: Any = DRAFTER, **options: Any) -> Engine:
    """Return an engine with the demo model, and with `drafter` if `speculation` is true."""
    if not speculation:
        drafter = None
    return Engine(TARGET, drafter, **with_internal(options))


def with_internal(options: dict[str, Any]) -> dict[str, Any]:
    """Return engine options in which those of `InternalOptions` are moved to this object."""
    names = {field.name for field in fields(InternalOptions)}
    internal = {name: value for name, value in options.items() if name in names}
    public = {name: value for name, value in options.items() if name not in names}
    return {**public, "internal": InternalOptions(**internal)}


def skip_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build engines without running prefill chunks of all sizes.

    These chunks have 4,088 rows, for which kernels that run as PTX with race detection need more
    than 15 minutes.
    """
    monkeypatch.setattr(Prefill, "warm", lambda self, lane: [])


def patch_kernel_source(monkeypatch: pytest.MonkeyPatch, path: str, old: str, new: str) -> None:
    """Replace a text in a kernel source file. Kernels that are loaded later use the changed source.

    Parameters
    ----------
    monkeypatch
        Fixture of the test.
    path
        Path of the file, relative to the package. A header affects all kernels of its folder.
    old, new
        Text that occurs exactly once in the file, and its replacement.
    """
    original_load = Device.load
    changed = Path(path)

    @functools.cache
    def patched_copy(source_folder: Path) -> Path:
        files = sorted(file for file in source_folder.iterdir() if file.is_file())
        sources = {changed.parent / file.name: file.read_text() for file in files}
        text = sources[changed]
        assert text.count(old) == 1, f"{path} contains {old!r} {text.count(old)} times"
        sources[changed] = text.replace(old, new)
        return write_sources(sources) / changed.parent

    def load(device: Device, source: Path, defines: Any = None) -> Any:
        same_folder = str(source.parent).endswith(str(changed.parent))
        if same_folder and (source.name == changed.name or changed.suffix == ".cuh"):
            source = patched_copy(source.parent) / source.name
        return original_load(device, source, defines)

    monkeypatch.setattr(Device, "load", load)


class FixedDraftLengths:
    """Replacement of `DraftBudget` that chooses the given draft lengths one after another.

    It also checks that the reported numbers of accepted, known and possible drafts ascend.
    """

    def __init__(self, lengths: Iterable[int]):
        self._lengths = iter(lengths)

    def choose(self, bucket: int, requests: Any) -> int:
        return next(self._lengths)

    def record_acceptance(
        self, request: Any, bucket: int, length: int, capacity: int, num_known: int, accepted: int
    ) -> None:
        assert accepted <= num_known <= capacity
        assert accepted <= bucket * length


def task_request(task: Task, **options: Any) -> Request:
    """Return a request with the prompt and grammar of a task.

    If `options` has `max_tokens`, the output may be cut off.
    """
    fields = {"max_tokens": 160, "closing": "off" if "max_tokens" in options else "auto", **options}
    import llguidance  # noqa: F401 (tests of guided requests are skipped without a grammar library)

    return Request(prompt=task.text, grammar=task_grammar(task), **fields)


def outputs(events: Iterable[Event]) -> dict[str, Output]:
    """Return the outputs among events, by id."""
    return {event.id: event.output for event in events if event.output is not None}


def drain(engine: Engine) -> dict[str, Output]:
    """Step until no request is unfinished, and return the outputs."""
    found: dict[str, Output] = {}
    while engine.busy:
        found |= outputs(engine.step())
    return found


def mixed_requests(count: int, seed: int = 7, **options: Any) -> list[Request]:
    """Return requests for demo tasks.

    The schema of every third request has keys that are not in the training data of the demo
    model.
    """
    tasks = list(held_out_tasks(count, seed))
    unseen = list(unseen_key_tasks(count, seed))
    tasks[2::3] = unseen[2::3]
    return [task_request(task, **options) for task in tasks]
