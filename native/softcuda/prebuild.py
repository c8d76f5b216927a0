"""Compile graft's kernels for the wheel, so that the soft device needs no compiler for them.

CMake runs this program from the folder ``native``::

    python -m softcuda.prebuild FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from .compile import build_portable

ROOT = Path(__file__).resolve().parents[2]
#: Folders of all include paths.
INCLUDE_FOLDERS = (ROOT, ROOT / "cudagraph" / "kernels")
#: Dimensions of attention heads, by the type of the KV cache. Other dimensions need a compiler.
HEAD_DIMS = {
    "bf16_t": (32, 64, 80, 96, 128, 256),
    "fp16_t": (64, 80, 96, 128, 256),
    "float": (64, 128),
}
#: Sources without macros.
PLAIN = (
    "cudagraph/kernels/mailbox.cu",
    "cudagraph/kernels/waiting.cu",
    "models/cache/kernels/pages.cu",
    "models/drafters/kernels/dflash.cu",
    "models/drafters/kernels/feed.cu",
    "models/drafters/kernels/lookup.cu",
    "models/drafters/kernels/mtp.cu",
    "models/drafters/kernels/user.cu",
    "models/round/kernels/loop.cu",
    "models/round/kernels/prefill.cu",
    "models/round/kernels/round.cu",
    "models/round/kernels/timing.cu",
)
#: Sources that are not compiled for the wheel, because the soft device does not run them by default
#: or only measurements use them.
LEFT_OUT = (
    "models/llm/kernels/attention_plan.cu",
    "models/llm/kernels/attention_prompt.cu",
    "models/llm/kernels/attention_split.cu",
    "models/llm/kernels/attention_warp.cu",
    "models/llm/kernels/linear_few.cu",
    "models/llm/kernels/linear_many.cu",
    "models/llm/kernels/linear_warp.cu",
    "tools/kernels/clock.cu",
)
#: Names of the sources in sampling/kernels.
SAMPLING = (
    *("adjust", "candidates", "given_drafts", "mask", "mask_rows", "proposals", "sample"),
    *("selector", "slot", "tree", "verify"),
)


def variants() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the path and the macros of each kernel module that the wheel contains.

    These are the modules that engines load on the soft device, for checkpoints of the types and
    head dimensions in `HEAD_DIMS`.
    """
    for path in PLAIN:
        yield path, {}
    for name in SAMPLING:
        yield f"sampling/kernels/{name}.cu", {"SAMPLE_BLOCK": "1"}
    yield "grammar/automaton/kernels/automaton.cu", {"BLOCK": "1"}
    for weight in (*HEAD_DIMS, "e4m3_t"):
        yield "models/llm/kernels/linear_thread.cu", {"WEIGHT": weight}
    for weight, head_dims in HEAD_DIMS.items():
        elements = {"WEIGHT": weight, "CHUNK": "64"}
        norm = {"WEIGHT": weight, "NORM_THREADS": "1"}
        for out in ({}, {"OUT": "float"}):
            yield "models/llm/kernels/elements.cu", elements | out
            yield "models/llm/kernels/norm.cu", norm | out
        yield "models/llm/kernels/compact.cu", {"CACHE": weight}
        for size in head_dims:
            attention = {"CACHE": weight, "HEAD_DIM": str(size)}
            yield "models/llm/kernels/attention_thread.cu", attention
            yield "models/llm/kernels/rope.cu", attention | {"CHUNK": str(size // 2)}


def build(output: Path, variant: tuple[str, dict[str, str]]) -> None:
    """Compile one kernel module to a folder."""
    path, defines = variant
    source = ROOT / path
    folders = [*INCLUDE_FOLDERS]
    if source.parent not in folders:
        folders.append(source.parent)
    name, image = build_portable(
        source.read_text(), source.name, defines=defines, include_dirs=folders
    )
    (output / name).write_bytes(image)


def main(output: Path) -> None:
    """Compile all kernel modules to a folder."""
    output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(build, output), variants()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
