// Memory that graph nodes allocate and free (INVARIANTS.md M9).
#include <algorithm>

#include "graph_nodes.h"
#include "memory_pools.h"

namespace softcuda {
namespace {

// Counts the memory of allocation nodes, which the graph memory attributes of the device report
// (cuDeviceGetGraphMemAttribute). Memory stays reserved until cuDeviceGraphMemTrim releases it.
MemoryPool& g_pool = *new MemoryPool;
// The allocations of g_pool. Destroyed ones are removed when another one is added.
std::vector<std::weak_ptr<Allocation>>& g_counted = *new std::vector<std::weak_ptr<Allocation>>;
// Unit in bytes in which the memory of graphs is counted.
constexpr size_t kUnit = 2 << 20;

size_t charged_bytes(const Allocation& a) { return (a.size + kUnit - 1) / kUnit * kUnit; }

void count(const std::shared_ptr<Allocation>& a) {
  if (a->graph->counted) return;
  a->graph->counted = true;
  g_pool.release_threshold = ~uint64_t{0};
  g_pool.grow(charged_bytes(*a));
  g_counted.erase(std::remove_if(g_counted.begin(), g_counted.end(),
                                 [](const auto& weak) { return weak.expired(); }),
                  g_counted.end());
  g_counted.push_back(a);
}

void uncount(Allocation& a) {
  if (!a.graph->counted) return;
  a.graph->counted = false;
  g_pool.shrink(charged_bytes(a));
}

// Called when the last graph with the allocation node is destroyed. If the memory is still
// allocated, the user frees it later.
void abandon(const std::shared_ptr<Allocation>& a) {
  std::lock_guard<std::mutex> lock(memory_mutex());
  a->graph->abandoned = true;
  if (a->graph->allocated || a->live.load()) return;
  uncount(*a);
  release_range(a);
}

void free_node_memory(const std::shared_ptr<Allocation>& a) {
  std::lock_guard<std::mutex> lock(memory_mutex());
  close_range(a);
  if (!a->graph->abandoned) return;
  uncount(*a);
  release_range(a);
}

}  // namespace

void run_memory(const Work& work) {
  const auto& a = work.memory->allocation;
  try {
    if (work.kind == WorkKind::mem_alloc) {
      std::lock_guard<std::mutex> lock(memory_mutex());
      open_range(*a);
    } else if (a->graph != nullptr) {
      free_node_memory(a);
    } else {
      free_memory(a);
      std::lock_guard<std::mutex> lock(memory_mutex());
      if (a->pool) a->pool->shrink(a->size);
    }
  } catch (const Refused&) {
    // The function that freed the memory found that bytes outside of it were overwritten, and has
    // recorded this fault.
  }
}

std::shared_ptr<MemoryWork> make_alloc(const CUDA_MEM_ALLOC_NODE_PARAMS& params) {
  require(params.bytesize > 0, CUDA_ERROR_INVALID_VALUE,
          "an allocation node must allocate at least 1 byte");
  kind_of(params.poolProps.allocType, params.poolProps.location);
  require(params.poolProps.handleTypes == 0 && params.poolProps.maxSize == 0,
          CUDA_ERROR_INVALID_VALUE, "memory of a graph cannot be exported and has no size limit");
  require(params.accessDescs != nullptr || params.accessDescCount == 0);
  auto work = std::make_shared<MemoryWork>();
  work->params = params;
  work->access.assign(params.accessDescs, params.accessDescs + params.accessDescCount);
  for (const CUmemAccessDesc& access : work->access) {
    require(access.location.type == CU_MEM_LOCATION_TYPE_DEVICE && access.location.id == 0 &&
                access.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            CUDA_ERROR_INVALID_VALUE, "only device 0 can access the memory of a graph");
  }
  work->params.accessDescs = work->access.data();
  return work;
}

std::shared_ptr<MemoryWork> make_free(CUdeviceptr p) {
  auto work = std::make_shared<MemoryWork>();
  work->allocation = find_device_start(p);
  require(work->allocation != nullptr, CUDA_ERROR_INVALID_VALUE,
          "the address is not the start of an allocation");
  return work;
}

void attach_memory(const void* graph, const Work& work) {
  MemoryWork& memory = *work.memory;
  if (work.kind == WorkKind::mem_alloc) {
    if (memory.params.bytesize == 0) return;
    const auto& pool = memory.params.poolProps;
    auto a = allocate_closed(memory.params.bytesize, kind_of(pool.allocType, pool.location));
    a->graph = std::make_unique<GraphMemory>();
    a->graph->graph = graph;
    memory.allocation = a;
    memory.params.dptr = a->device_address();
    memory.lease = std::shared_ptr<void>(nullptr, [a](void*) { abandon(a); });
    return;
  }
  std::lock_guard<std::mutex> lock(memory_mutex());
  GraphMemory* const state = memory.allocation->graph.get();
  require(state != nullptr, CUDA_ERROR_INVALID_VALUE,
          "a free node can only free memory that an allocation node allocates");
  const bool same = state->graph == graph;
  require(!state->has_free_node && !(same && state->freed_elsewhere), CUDA_ERROR_INVALID_VALUE,
          "the memory already has a free node");
  (same ? state->has_free_node : state->freed_elsewhere) = true;
}

void submit_graph_memory(const Program& program, bool auto_free) {
  if (program.memory_nodes.empty()) return;
  std::lock_guard<std::mutex> lock(memory_mutex());
  const auto for_each = [&](WorkKind kind, const auto& visit) {
    for (const Op* node : program.memory_nodes) {
      const auto& a = node->work.memory->allocation;
      if (node->work.kind == kind && a) visit(a);
    }
  };
  for_each(WorkKind::mem_alloc, [&](const std::shared_ptr<Allocation>& a) {
    require(auto_free || !a->graph->allocated, CUDA_ERROR_INVALID_VALUE,
            "the memory that an earlier launch of the graph allocated is not freed");
  });
  for_each(WorkKind::mem_free, [&](const std::shared_ptr<Allocation>& a) {
    require(a->graph->has_free_node || a->graph->allocated, CUDA_ERROR_INVALID_VALUE,
            "a free node of the graph frees memory that is not allocated");
  });
  for_each(WorkKind::mem_alloc, [&](const std::shared_ptr<Allocation>& a) {
    count(a);
    a->graph->allocated = true;
  });
  for_each(WorkKind::mem_free,
           [&](const std::shared_ptr<Allocation>& a) { a->graph->allocated = false; });
}

}  // namespace softcuda

using namespace softcuda;

static CUgraphNode add_memory_node(CUgraph graph, const CUgraphNode* deps, size_t n, Work work) {
  CUgraphNode node = nullptr;
  auto added = std::make_shared<Node>();
  added->type = type_of(work.kind);
  added->work = std::move(work);
  add_node(&node, graph, deps, n, std::move(added));
  return node;
}

void softcuda::add_alloc_node(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                              CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  require(out != nullptr && params != nullptr);
  const auto work = make_alloc(*params);
  *out = add_memory_node(graph, deps, n, Work(WorkKind::mem_alloc, work));
  params->dptr = work->params.dptr;
}

void softcuda::add_free_node(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                             CUdeviceptr p) {
  require(out != nullptr);
  *out = add_memory_node(graph, deps, n, Work(WorkKind::mem_free, make_free(p)));
}

SC_API(cuGraphAddMemAllocNode, 11040, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*,
       deps, size_t, n, CUDA_MEM_ALLOC_NODE_PARAMS*, params) {
  add_alloc_node(out, graph, deps, n, params);
}

SC_API(cuGraphAddMemFreeNode, 11040, 0, CUgraphNode*, out, CUgraph, graph, const CUgraphNode*, deps,
       size_t, n, CUdeviceptr, p) {
  add_free_node(out, graph, deps, n, p);
}

static void require_device(CUdevice device) { require(device == 0, CUDA_ERROR_INVALID_DEVICE); }

SC_API(cuDeviceGetGraphMemAttribute, 11040, kNoLock, CUdevice, device, int, attribute, void*, out) {
  require_device(device);
  require(out != nullptr && attribute >= CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT &&
          attribute <= CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
  std::lock_guard<std::mutex> lock(memory_mutex());
  const uint64_t values[] = {g_pool.used, g_pool.used_high, g_pool.reserved, g_pool.reserved_high};
  *static_cast<uint64_t*>(out) = values[attribute];
}

SC_API(cuDeviceSetGraphMemAttribute, 11040, kNoLock, CUdevice, device, int, attribute, void*,
       value) {
  require_device(device);
  require(value != nullptr);
  require((attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH ||
           attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) &&
              *static_cast<const uint64_t*>(value) == 0,
          CUDA_ERROR_INVALID_VALUE, "only the high watermarks can be set, and only to 0");
  std::lock_guard<std::mutex> lock(memory_mutex());
  const bool used = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH;
  (used ? g_pool.used_high : g_pool.reserved_high) = used ? g_pool.used : g_pool.reserved;
}

SC_API(cuDeviceGraphMemTrim, 11040, 0, CUdevice, device) {
  require_device(device);
  std::lock_guard<std::mutex> lock(memory_mutex());
  for (auto& weak : g_counted) {
    const auto a = weak.lock();
    if (a && !a->graph->allocated && !a->live.load()) uncount(*a);
  }
  g_counted.erase(std::remove_if(g_counted.begin(), g_counted.end(),
                                 [](const std::weak_ptr<Allocation>& weak) {
                                   const auto a = weak.lock();
                                   return !a || !a->graph->counted;
                                 }),
                  g_counted.end());
  g_pool.trim(0);
}
