"""Device resources and green contexts."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from softcuda_util import code

#: Words of CUdevResource, and the index of the first field of a resource of multiprocessors.
WORDS, COUNT = 36, 24


def multiprocessors(soft: Any, count: int) -> tuple[Any, Any]:
    """Return a resource of `count` multiprocessors with an alignment of 2, and its memory."""
    words = (ctypes.c_uint32 * WORDS)(1)
    words[COUNT : COUNT + 3] = (count, 2, 2)
    return soft.d.CUdevResource(ctypes.addressof(words)), words


def groups(soft: Any, *sizes: tuple[int, int, int]) -> list[Any]:
    """Return the parameters of groups from (size, number of co-scheduled, flags)."""
    out = []
    for size, together, flags in sizes:
        p = soft.d.CU_DEV_SM_RESOURCE_GROUP_PARAMS()
        p.smCount, p.coscheduledSmCount, p.flags = size, together, flags
        out.append(p)
    return out


@pytest.mark.parametrize(
    ("sizes", "expected", "rest"),
    [
        ([(4, 0, 0), (2, 0, 0)], [4, 2], 4),
        ([(0, 4, 0)], [8], 2),
        ([(6, 4, 1), (0, 0, 1)], [6, 4], 0),
    ],
)
def test_resources_split_into_groups(soft, sizes, expected, rest):
    """A group gets its size, or as many multiprocessors as fit its alignment."""
    resource, _words = multiprocessors(soft, 10)
    parameters = groups(soft, *sizes)
    parts, remaining = soft.cuDevSmResourceSplit(len(sizes), resource, 0, parameters)
    assert [part.sm.smCount for part in parts] == expected
    assert remaining.sm.smCount == rest
    assert int(remaining.type) == (1 if rest else 0)


@pytest.mark.parametrize("size", [(3, 0, 0), (12, 0, 0), (6, 4, 0), (4, 3, 0)])
def test_resources_refuse_sizes_that_are_not_available(soft, size):
    """Odd, unaligned and too large groups are refused."""
    resource, _words = multiprocessors(soft, 10)
    result = soft.d.cuDevSmResourceSplit(1, resource, 0, groups(soft, size))
    assert code(result) == "INVALID_RESOURCE_CONFIGURATION"


def test_green_context_has_streams_and_resources(soft):
    """A stream reports the green context and its resources; work runs as on other streams."""
    resource, _words = multiprocessors(soft, 2)
    descriptor = soft.cuDevResourceGenerateDesc([resource], 1)
    green = soft.cuGreenCtxCreate(descriptor, 0, 1)
    context = soft.cuCtxFromGreenCtx(green)
    stream = soft.cuGreenCtxStreamCreate(green, 1, 0)
    plain = soft.stream()
    assert int(soft.cuStreamGetGreenCtx(stream)) == int(green)
    assert int(soft.cuStreamGetGreenCtx(plain)) == 0
    assert int(soft.cuStreamGetCtx(stream)) == int(context)
    primary, found = soft.cuStreamGetCtx_v2(stream)
    assert (int(primary), int(found)) == (int(soft.context), int(green))
    kind = soft.d.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    assert soft.cuCtxGetDevResource(context, kind).sm.smCount == 2
    assert soft.cuStreamGetDevResource(stream, kind).sm.smCount == 2
    device = soft.cuDeviceGetDevResource(0, kind).sm.smCount
    assert soft.cuStreamGetDevResource(plain, kind).sm.smCount == device
    pointer = soft.ints(0)
    soft.cuMemsetD32Async(pointer, 7, 1, stream)
    soft.cuStreamSynchronize(stream)
    assert soft.value(pointer) == 7
    soft.cuCtxPushCurrent(context)
    assert int(soft.cuStreamGetGreenCtx(0)) == int(green)
    soft.cuCtxPopCurrent()
    soft.cuStreamDestroy(stream)
    soft.cuGreenCtxDestroy(green)
    assert code(soft.d.cuCtxSetCurrent(context)) == "INVALID_CONTEXT"
