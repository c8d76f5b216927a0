"""Memory pools, stream-ordered allocation, memory nodes of graphs, managed and virtual memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from softcuda_util import code, codes, run_child

MIB = 1 << 20
#: Attributes of memory pools and of graph memory.
THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 4, 5, 6, 7, 8
GRAPH_USED, GRAPH_RESERVED = 0, 2


@pytest.fixture
def pool(soft):
    """A pool of device memory without a size limit."""
    handle = soft.cuMemPoolCreate(soft.alloc_params(1).poolProps)
    yield handle
    soft.d.cuMemPoolDestroy(handle)


def attribute(soft, pool, number):
    """Return an attribute of a pool."""
    return int(soft.cuMemPoolGetAttribute(pool, soft.d.CUmemPool_attribute(number)))


def graph_attribute(soft, number):
    """Return an attribute of the memory of graphs."""
    return int(soft.cuDeviceGetGraphMemAttribute(0, soft.d.CUgraphMem_attribute(number)))


def free_stale(soft, graph):
    """Destroy a graph and release the memory that was reserved for graphs."""
    soft.cuGraphDestroy(graph)
    soft.cuDeviceGraphMemTrim(0)


def test_pool_attributes_count_used_and_reserved_memory(soft, pool, stream):
    """An allocation counts as used until its free has run. Reserved memory is a multiple of 2 MiB.

    A release threshold keeps memory reserved; cuMemPoolTrimTo releases it.
    """
    soft.cuMemPoolSetAttribute(
        pool, soft.d.CUmemPool_attribute(THRESHOLD), soft.d.cuuint64_t(4 * MIB)
    )
    p = soft.cuMemAllocFromPoolAsync(3 * MIB, pool, stream)
    assert [attribute(soft, pool, n) for n in (USED, RESERVED)] == [3 * MIB, 4 * MIB]
    soft.cuMemFreeAsync(p, stream)
    soft.cuStreamSynchronize(stream)
    assert [attribute(soft, pool, n) for n in (USED, USED_HIGH)] == [0, 3 * MIB]
    assert attribute(soft, pool, RESERVED) == 4 * MIB
    soft.cuMemPoolTrimTo(pool, 0)
    assert [attribute(soft, pool, n) for n in (RESERVED, RESERVED_HIGH)] == [0, 4 * MIB]


def test_pool_limit_is_enforced(soft, stream):
    """Allocations beyond the maximum size of a pool return OUT_OF_MEMORY."""
    props = soft.alloc_params(1).poolProps
    props.maxSize = 2 * MIB
    pool = soft.cuMemPoolCreate(props)
    p = soft.cuMemAllocFromPoolAsync(2 * MIB, pool, stream)
    assert code(soft.d.cuMemAllocFromPoolAsync(1, pool, stream)) == "OUT_OF_MEMORY"
    soft.cuMemFree(p)
    soft.cuMemFree(soft.cuMemAllocFromPoolAsync(1, pool, stream))
    soft.cuMemPoolDestroy(pool)


def test_pool_memory_survives_the_pool_and_default_pool_cannot_be_destroyed(soft, pool, stream):
    """Destroying the current pool makes the default pool current; its memory stays valid."""
    default = soft.cuDeviceGetDefaultMemPool(0)
    soft.cuDeviceSetMemPool(0, pool)
    p = soft.cuMemAllocAsync(64, stream)
    pool_of = soft.d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    assert int(soft.cuPointerGetAttribute(pool_of, p)) == int(pool)
    soft.cuMemPoolDestroy(pool)
    assert int(soft.cuDeviceGetMemPool(0)) == int(default)
    soft.cuMemsetD8Async(p, 1, 64, stream)
    soft.cuMemFreeAsync(p, stream)
    soft.cuStreamSynchronize(stream)
    assert code(soft.d.cuMemPoolDestroy(default)) == "INVALID_VALUE"


def test_stream_ordered_free_waits_for_earlier_work(soft, words, stream):
    """Memory can be used by work that is queued before its free, but not freed twice."""
    p = int(soft.cuMemAllocAsync(4, stream))
    words.block(stream)
    soft.cuMemsetD32Async(p, 7, 1, stream)
    seen = soft.alloc(4)
    soft.cuMemcpyDtoDAsync(seen, p, 4, stream)
    soft.cuMemFreeAsync(p, stream)
    assert codes(soft.d.cuMemFreeAsync(p, stream)) == {"INVALID_VALUE"}
    words[0] = 1
    soft.cuStreamSynchronize(stream)
    assert soft.value(seen) == 7
    assert codes(soft.d.cuMemFreeAsync(p, stream), soft.d.cuMemFree(p)) == {"INVALID_VALUE"}


def test_stream_ordered_free_before_use_is_a_fault():
    """Work that runs after its memory was freed is a fault, even if queued before the free."""
    done = run_child(
        """
        stream, words = s.stream(), Words(s, 1)
        p = int(s.cuMemAllocAsync(4, stream))
        words.block(stream)
        s.cuMemFreeAsync(p, stream)
        s.cuMemsetD32Async(p, 7, 1, stream)
        words[0] = 1
        print(code(d.cuStreamSynchronize(stream)), s.fault())
        """
    )
    assert "ILLEGAL_ADDRESS use after free: a memset" in done.stdout, done.stderr


def test_graph_memory_is_valid_between_allocation_and_free_node(soft, stream, graph, kernels):
    """Each launch allocates and frees; the address is the same in every launch."""
    out = soft.ints(0)
    params = soft.alloc_params(4)
    first = soft.cuGraphAddMemAllocNode(graph, [], 0, params)
    p = int(params.dptr)
    fill = soft.add_fill(graph, [first], p, 20)
    add = soft.add_int_kernel(graph, [fill], kernels.add, p, 3)
    copy = soft.cuGraphAddMemcpyNode(graph, [add], 1, soft.copy_params(out, p, 4), soft.context)
    free = soft.cuGraphAddMemFreeNode(graph, [copy], 1, p)
    assert int(soft.cuGraphMemAllocNodeGetParams(first).dptr) == p
    assert int(soft.cuGraphMemAllocNodeGetParams(first).bytesize) == 4
    assert int(soft.cuGraphMemFreeNodeGetParams(free)) == p
    soft.replay(graph, stream, launches=3)
    assert soft.value(out) == 23
    assert code(soft.d.cuMemFree(p)) == "INVALID_VALUE"
    free_stale(soft, graph)


def test_graph_memory_without_free_node_must_be_freed_before_the_next_launch(soft, stream, graph):
    """A relaunch is refused until the memory is freed, unless AUTO_FREE_ON_LAUNCH frees it."""
    params = soft.alloc_params(4)
    first = soft.cuGraphAddMemAllocNode(graph, [], 0, params)
    p = int(params.dptr)
    soft.add_fill(graph, [first], p, 5)
    executable = soft.cuGraphInstantiate(graph, 0)
    assert code(soft.d.cuMemFreeAsync(p, stream)) == "INVALID_VALUE"
    soft.cuGraphLaunch(executable, stream)
    assert code(soft.d.cuGraphLaunch(executable, stream)) == "INVALID_VALUE"
    soft.cuStreamSynchronize(stream)
    assert soft.value(p) == 5
    soft.cuMemFreeAsync(p, stream)
    soft.cuGraphLaunch(executable, stream)
    soft.cuMemFree(p)
    soft.cuGraphExecDestroy(executable)
    executable = soft.cuGraphInstantiate(graph, 1)
    soft.play(executable, stream, launches=2)
    assert soft.value(p) == 5
    soft.cuGraphExecDestroy(executable)
    soft.cuGraphDestroy(graph)
    assert soft.value(p) == 5  # the memory outlives its graph until it is freed
    soft.cuMemFree(p)
    assert code(soft.d.cuMemsetD8(p, 0, 1)) == "INVALID_VALUE"
    soft.cuDeviceGraphMemTrim(0)


def test_graph_memory_can_be_freed_by_another_graph(soft, stream, graph):
    """A free node of another graph frees memory that is allocated, and only such memory."""
    params = soft.alloc_params(4)
    soft.cuGraphAddMemAllocNode(graph, [], 0, params)
    second = soft.cuGraphCreate(0)
    soft.cuGraphAddMemFreeNode(second, [], 0, params.dptr)
    assert code(soft.d.cuGraphAddMemFreeNode(graph, [], 0, params.dptr)) == "INVALID_VALUE"
    allocate = soft.cuGraphInstantiate(graph, 0)
    free = soft.cuGraphInstantiate(second, 0)
    assert code(soft.d.cuGraphLaunch(free, stream)) == "INVALID_VALUE"
    for _ in range(2):
        soft.cuGraphLaunch(allocate, stream)
        soft.cuGraphLaunch(free, stream)
    soft.cuStreamSynchronize(stream)
    for executable in (allocate, free):
        soft.cuGraphExecDestroy(executable)
    soft.cuGraphDestroy(second)
    free_stale(soft, graph)


def test_graph_with_memory_nodes_has_documented_restrictions(soft, graph):
    """Such a graph has one executable graph at a time and cannot be cloned or lose nodes."""
    d = soft.d
    params = soft.alloc_params(4)
    first = soft.cuGraphAddMemAllocNode(graph, [], 0, params)
    second = soft.cuGraphAddEmptyNode(graph, [first], 1)
    executable = soft.cuGraphInstantiate(graph, 0)
    parent = soft.cuGraphCreate(0)
    assert codes(
        d.cuGraphInstantiate(graph, 0),
        d.cuGraphClone(graph),
        d.cuGraphAddChildGraphNode(parent, [], 0, graph),
        d.cuGraphDestroyNode(second),
        d.cuGraphRemoveDependencies(graph, [first], [second], None, 1),
    ) == {"NOT_SUPPORTED"}
    soft.cuGraphExecDestroy(executable)
    soft.cuGraphExecDestroy(soft.cuGraphInstantiate(graph, 0))
    free_stale(soft, graph)


def test_capture_turns_stream_ordered_allocation_into_memory_nodes(soft, stream):
    """cuMemAllocAsync and cuMemFreeAsync of a capturing stream add nodes and allocate nothing."""
    before = graph_attribute(soft, GRAPH_USED)
    outside = soft.cuMemAllocAsync(4, stream)
    soft.begin(stream)
    p = soft.cuMemAllocAsync(4, stream)
    soft.cuMemsetD32Async(p, 9, 1, stream)
    assert code(soft.d.cuMemFreeAsync(outside, stream)) == "INVALID_VALUE"
    soft.cuMemFreeAsync(p, stream)
    graph = soft.cuStreamEndCapture(stream)
    nodes = soft.cuGraphGetNodes(graph, 3)[0]
    names = [soft.cuGraphNodeGetType(node).name.split("TYPE_")[1] for node in nodes]
    assert names == ["MEM_ALLOC", "MEMSET", "MEM_FREE"]
    assert graph_attribute(soft, GRAPH_USED) == before
    soft.replay(graph, stream, launches=2)
    assert graph_attribute(soft, GRAPH_USED) == before + 2 * MIB
    soft.cuDeviceGraphMemTrim(0)
    assert graph_attribute(soft, GRAPH_RESERVED) == before
    soft.cuMemFree(outside)
    soft.cuGraphDestroy(graph)


def test_managed_memory_has_one_address_for_host_and_device(soft, kernels):
    """Host code, kernels and copies use the same address. Pointer attributes report it."""
    p = int(soft.cuMemAllocManaged(64, 1))
    view = np.frombuffer((ctypes.c_int32 * 16).from_address(p), np.int32)
    view[0] = 40
    soft.run(kernels.add, 1, 1, p, np.int32(2))
    assert view[0] == 42 == soft.value(p)
    kinds = soft.d.CUpointer_attribute
    names = ["IS_MANAGED", "DEVICE_POINTER", "HOST_POINTER", "MEMORY_TYPE", "RANGE_SIZE"]
    found = [
        int(soft.cuPointerGetAttribute(getattr(kinds, f"CU_POINTER_ATTRIBUTE_{name}"), p))
        for name in names
    ]
    assert found == [1, p, p, 2, 64]
    assert code(soft.d.cuMemFreeHost(p)) == "INVALID_VALUE"
    soft.cuMemFree(p)
    assert code(soft.d.cuMemsetD8(p, 0, 1)) == "INVALID_VALUE"


def test_managed_memory_returns_advice_and_prefetch_location(soft, stream):
    """cuMemRangeGetAttribute returns what cuMemAdvise and cuMemPrefetchAsync have stored."""
    advice, kinds = soft.d.CUmem_advise, soft.d.CUmem_range_attribute
    p = soft.cuMemAllocManaged(4096, 1)
    host, device = soft.d.CUmemLocation(), soft.d.CUmemLocation()
    host.type, device.type = soft.d.CUmemLocationType(2), soft.d.CUmemLocationType(1)

    def attributes():
        return [
            soft.cuMemRangeGetAttribute(size, kinds(number), p, 4096)
            for number, size in ((1, 4), (2, 4), (3, 12), (4, 4))
        ]

    assert attributes() == [0, -2, [-2, -2, -2], -2]
    soft.cuMemAdvise(p, 4096, advice.CU_MEM_ADVISE_SET_READ_MOSTLY, device)
    soft.cuMemAdvise(p, 4096, advice.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host)
    soft.cuMemAdvise(p, 4096, advice.CU_MEM_ADVISE_SET_ACCESSED_BY, host)
    soft.cuMemAdvise(p, 4096, advice.CU_MEM_ADVISE_SET_ACCESSED_BY, device)
    soft.cuMemPrefetchAsync(p, 4096, device, 0, stream)
    assert attributes() == [1, -1, [0, -1, -2], 0]
    soft.cuMemAdvise(p, 4096, advice.CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, host)
    soft.cuMemAdvise(p, 4096, advice.CU_MEM_ADVISE_UNSET_ACCESSED_BY, device)
    assert attributes() == [1, -2, [-1, -2, -2], 0]
    soft.cuMemFree(p)


def reserve_and_map(soft, count):
    """Return a reserved range and the physical memory that is mapped into its 64-KiB pieces."""
    base = int(soft.cuMemAddressReserve(count * 65536, 0, 0, 0))
    handles = [soft.cuMemCreate(65536, soft.memory_properties(), 0) for _ in range(count)]
    for i, handle in enumerate(handles):
        soft.cuMemMap(base + i * 65536, 65536, 0, handle, 0)
    return base, handles


def access(soft, flags):
    """Return the description of the device's access."""
    p = soft.d.CUmemAccessDesc()
    p.location.type = soft.d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.flags = soft.d.CUmemAccess_flags(flags)
    return p


def test_virtual_memory_mappings_are_contiguous_and_share_pages(soft):
    """Copies cross the border of two mappings. Imported memory has the contents of the export."""
    base, handles = reserve_and_map(soft, 2)
    soft.cuMemSetAccess(base, 2 * 65536, [access(soft, 3)], 1)
    soft.cuMemsetD8(base, 3, 2 * 65536)
    assert (soft.get(base + 65000, 1000, np.uint8) == 3).all()
    kind = soft.d.CUmemAllocationHandleType(1)
    file = soft.cuMemExportToShareableHandle(handles[1], kind, 0)
    imported = soft.cuMemImportFromShareableHandle(file, kind)
    second = int(soft.cuMemAddressReserve(65536, 0, 0, 0))
    soft.cuMemMap(second, 65536, 0, imported, 0)
    soft.cuMemSetAccess(second, 65536, [access(soft, 3)], 1)
    soft.cuMemsetD8(second, 9, 1)
    assert list(soft.get(base + 65535, 2, np.uint8)) == [3, 9]
    for at, size in ((base, 2 * 65536), (second, 65536)):
        soft.cuMemUnmap(at, size)
        soft.cuMemAddressFree(at, size)
    for handle in (*handles, imported):
        soft.cuMemRelease(handle)


def test_virtual_memory_rejects_overlaps_and_partial_ranges(soft):
    """Mappings may not overlap, and only whole mappings and reservations can be released."""
    d = soft.d
    free_before = soft.cuMemGetInfo()[0]
    base, handles = reserve_and_map(soft, 2)
    assert soft.cuMemGetInfo()[0] == free_before - 2 * 65536
    assert codes(
        d.cuMemMap(base, 65536, 0, handles[1], 0),
        d.cuMemAddressFree(base, 2 * 65536),
        d.cuMemFree(base),
        d.cuMemFreeAsync(base, 0),
        d.cuMemUnmap(base + 65536, 2 * 65536),
    ) == {"INVALID_VALUE"}
    again = soft.cuMemRetainAllocationHandle(base + 65540)
    assert int(again) == int(handles[1])
    soft.cuMemRelease(again)
    soft.cuMemUnmap(base, 65536)
    assert codes(d.cuMemUnmap(base, 65536), d.cuMemAddressFree(base, 65536)) == {"INVALID_VALUE"}
    soft.cuMemUnmap(base + 65536, 65536)
    soft.cuMemAddressFree(base, 2 * 65536)
    for handle in handles:
        soft.cuMemRelease(handle)
    assert code(d.cuMemRelease(handles[0])) == "INVALID_VALUE"
    assert soft.cuMemGetInfo()[0] == free_before


def test_virtual_memory_without_access_is_a_fault():
    """Device work that writes memory without write access is a fault."""
    done = run_child(
        """
        base = int(s.cuMemAddressReserve(65536, 0, 0, 0))
        s.cuMemMap(base, 65536, 0, s.cuMemCreate(65536, s.memory_properties(), 0), 0)
        print(code(d.cuMemsetD8(base, 1, 16)))
        """
    )
    assert "ILLEGAL_ADDRESS" in done.stdout, done.stderr
