"""Plugin for pytest that compares the two forms of each kernel: PTX and code for the CPU.

Usage, with ``GRAFT_CODE=ptx``: ``pytest -p ptx_bits --ptx-bits REPORT tests``. Each kernel that a
test launches on a stream first runs in the form compiled for the CPU. Its memory is then restored
and the kernel runs on PTX. The report is a JSON object with two numbers for each kernel: compared
launches, and launches after which the allocations of the arguments had different contents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft.cudagraph.driver.driver import call, cu
from graft.cudagraph.kernels import compiler, kernels
from graft.cudagraph.lanes import StreamLane

#: Kernels whose results depend on time or on the order of host threads.
UNREPEATABLE = {"mailbox_request", "mailbox_wait", "round_begin", "timestamp"}
Contents = dict[int, np.ndarray]

_counts: dict[str, list[int]] = {}
_original_load = kernels.load_text
_original_launch = StreamLane.kernel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx-bits", type=Path, help="report of the comparison of both codes")


def pytest_configure() -> None:
    kernels.load_text = _load_both
    StreamLane.kernel = _launch_both  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("--ptx-bits").write_text(json.dumps(_counts))


def _load_both(
    context: Any, text: str, name: str, defines: Any = None, folder: Path | None = None
) -> Any:
    """Load a module, and as its attribute `for_cpu` the same source compiled for the CPU."""
    module = _original_load(context, text, name, defines, folder)
    loaded = compiler._compile_soft(compiler.KernelSource(text, name, defines or {}, folder))
    module.for_cpu = kernels.KernelModule(name, loaded, module.parameters, module.waiting)
    return module


def _allocations(args: tuple[object, ...]) -> Contents:
    """Return the contents of all allocations to which arguments point, by address."""
    found: Contents = {}
    for value in args:
        if not isinstance(value, kernels._POINTER_TYPES):
            continue
        status, base, size = cu.cuMemGetAddressRange(value.argument()[0])
        if int(status) == 0 and int(base) not in found:
            contents = np.empty(int(size), np.uint8)
            call(cu.cuMemcpyDtoH, contents.ctypes.data, base, int(size))
            found[int(base)] = contents
    return found


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether bytes are equal, apart from the bits of NaN, which differ on CPUs and GPUs."""
    different = np.flatnonzero(a != b) // 4 * 4
    if not len(different):
        return True
    words = different[:, None] + np.arange(4)
    both = [np.isnan(contents[words].view(np.float32)) for contents in (a, b)]
    return bool(np.all(both))


def _launch_both(
    lane: StreamLane, kernel: Any, grid: Any, block: Any, args: Any, **options: Any
) -> None:
    args = tuple(args)
    capturing = call(cu.cuStreamIsCapturing, lane.stream.handle)
    if int(capturing) != 0 or kernel.name in UNREPEATABLE:
        _original_launch(lane, kernel, grid, block, args, **options)
        return
    call(cu.cuStreamSynchronize, lane.stream.handle)
    before = _allocations(args)
    results = []
    for form in (kernel.module.for_cpu[kernel.name], kernel):
        for base, contents in before.items():
            call(cu.cuMemcpyHtoD, base, contents.ctypes.data, contents.nbytes)
        _original_launch(lane, form, grid, block, args, **options)
        call(cu.cuStreamSynchronize, lane.stream.handle)
        results.append(_allocations(args))
    equal = all(_equal(results[0][base], results[1][base]) for base in before)
    count = _counts.setdefault(kernel.name, [0, 0])
    count[0] += 1
    count[1] += not equal
