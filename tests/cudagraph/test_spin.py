"""Host steps that let the driver's thread spin."""

from __future__ import annotations

import os

import pytest

from graft.cudagraph import hostwork
from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph import Graph
from graft.cudagraph.hostwork import hostfunc


def test_spinning_steps_run_like_others(device: Device, stream: Stream) -> None:
    """Eager and graph steps with spin run once each, in order with blocking ones."""
    calls: list[str] = []
    hostfunc(stream, calls.append, "eager", spin="force")
    graph = Graph(device, "spin")
    lane = graph.lane("main")
    lane.host(lambda: calls.append("spins"), spin="force")
    lane.host(lambda: calls.append("blocks"))
    executable = graph.instantiate()
    for _ in range(2):
        executable.launch(stream)
    executable.synchronize(60)
    assert calls == ["eager"] + ["spins", "blocks"] * 2


def test_spin_needs_cores(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer than 4 usable cores spin is refused, naming the cost; "force" insists."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(OptionError, match=r"burns one core.*2 of the 4"):
        hostfunc(stream, list, spin=True)
    with pytest.raises(OptionError, match="spin must be"):
        hostfunc(stream, list, spin="yes")  # type: ignore[arg-type]
    hostfunc(stream, list, spin="force")
    stream.synchronize(60)


def test_drivers_without_spin_block(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver has no spinning host steps they block, and a warning says so."""
    monkeypatch.setattr(hostwork._native, "spin_supported", lambda: False)
    calls: list[int] = []
    with pytest.warns(UserWarning, match=r"CUDA 13\.2"):
        hostfunc(stream, calls.append, 1, spin="force")
    stream.synchronize(60)
    assert calls == [1]
