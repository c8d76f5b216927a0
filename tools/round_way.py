"""The way of one round: which files of graft take part in it, and how many lines they have.

Usage: ``python -m graft.tools.round_way``. Python files are those with a function that most rounds
call while a batch of the demo runs, between joining and ending. Kernels are those of a round's
graph, with what they include, but for the layers of the models (``LAYERS``): a round calls a
forward, as it would any model's. Native files are those where a round enters native code, what they
include, and the source beside an included header, unless a round that goes well runs nothing of it
(``ASIDE``). The grammar backend that stands behind ``guide/matcher.h`` is not counted.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from graft.cudagraph.device import Device
from graft.cudagraph.graph import GraphLane
from graft.cudagraph.kernels import Kernel
from graft.models.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model
from graft.tools.demo_prompts import demo_prompts

#: Where a round enters native code: the grammar's steps, host nodes, launches.
NATIVE = ("guide/worker.cpp", "hostwork/record.cpp", "hostwork/exec.h")
#: The driver's table is filled once; the reaper frees what is dropped.
ASIDE = ("hostwork/driver.cpp", "hostwork/reaper.cpp")
LAYERS = {"attention_split.cu", "attention_thread.cu", "attention_warp.cu", "elements.cu",
          "linear_few.cu", "linear_many.cu", "linear_thread.cu", "linear_warp.cu", "norm.cu",
          "rope.cu"}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
ROUNDS = 8


def python_files(engine: Engine) -> set[Path]:
    """Files with a function that most rounds in the middle of generation call.

    What a busy machine does now and then, as asking once more whether a prompt is over, is no
    part of a round's way.
    """
    seen: set[str] = set()
    called: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    prompt = demo_prompts()[0]
    waiting = {  # of one grammar: neither ends soon
        engine.submit(Request(prompt=prompt.text, grammar=prompt.grammar, max_tokens=128))
        for _ in range(2)
    }
    while waiting:  # until both have tokens, and prompts are over
        waiting -= {event.id for event in engine.step()}
    for _ in range(ROUNDS):
        seen.clear()
        sys.setprofile(profile)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        called.update(seen)
    rooms = {str(Path(__file__).resolve().parents[1] / room) for room in
             ("cudagraph", "grammar", "models", "native", "sampling")}
    found = {Path(name).resolve() for name, rounds in called.items()
             if name.endswith(".py") and 2 * rounds > ROUNDS}
    return {path for path in found if any(str(path).startswith(room) for room in rooms)}


def with_includes(files: Iterable[Path], folders: Iterable[Path]) -> set[Path]:
    """The files, what they include from the folders, and the sources beside included headers."""
    left, found, places = [path.resolve() for path in files], set[Path](), list(folders)
    aside = {folder / name for folder in places for name in ASIDE}
    while left:
        path = left.pop()
        if path in found or path in aside:
            continue
        found.add(path)
        wanted = [next((folder / name for folder in (path.parent, *places)
                        if (folder / name).is_file()), path)
                  for name in INCLUDE.findall(path.read_text(encoding="utf-8"))]
        if path.suffix == ".h" and path.with_suffix(".cpp").is_file():
            wanted.append(path.with_suffix(".cpp"))
        left += [each.resolve() for each in wanted]
    return found


def way() -> dict[str, dict[Path, int]]:
    """Files with their lines, by kind: Python, native, kernels."""
    loaded: dict[str, Path] = {}
    launched: set[str] = set()  # files of the nodes of a graph
    load, kernel = Device.load, GraphLane.kernel

    def note_load(self: Device, path: str | Path, *arguments: Any, **options: Any) -> Any:
        loaded[Path(path).name] = Path(path)
        return load(self, path, *arguments, **options)

    def note_node(self: GraphLane, node: Kernel, *arguments: Any, **options: Any) -> None:
        launched.add(node.module.name)
        kernel(self, node, *arguments, **options)

    root = Path(__file__).resolve().parents[1]
    Device.load, GraphLane.kernel = note_load, note_node  # type: ignore[method-assign, assignment]
    try:
        target, drafter = demo_model()
        with Engine(target, drafter, max_batch_size=2) as engine:
            called = python_files(engine)
    finally:
        Device.load, GraphLane.kernel = load, kernel  # type: ignore[method-assign]
    native = root / "native"
    folders = [root / "cudagraph" / "kernels", root / "sampling" / "kernels"]
    kernels = with_includes([loaded[name] for name in launched - LAYERS], folders)
    worker = with_includes([native / name for name in NATIVE], [native])
    kinds = {"Python": called, "kernels": kernels, "native": worker - kernels}
    return {kind: {path.relative_to(root): len(path.read_bytes().splitlines())
                   for path in sorted(paths)} for kind, paths in kinds.items()}


def main() -> int:
    """Print the files and lines."""
    kinds = way()
    every = {path: lines for files in kinds.values() for path, lines in files.items()}
    for kind, files in (*kinds.items(), ("the way of a round", every)):
        print(f"{kind}: {len(files)} files, {sum(files.values()):,} lines")
        for path, lines in files.items() if files is not every else ():
            print(f"  {lines:>5}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
