// Executable graphs: instantiation, launch and update (INVARIANTS.md G3 to G8).
#include <algorithm>
#include <functional>
#include <set>

#include "capture.h"
#include "conditionals.h"
#include "graph_nodes.h"
#include "memops.h"
#include "memory_pools.h"
#include "modules.h"

namespace softcuda {

Exec::Exec() { live_add(Resource::graph_exec, 1); }
Exec::~Exec() { live_add(Resource::graph_exec, -1); }

namespace {

// Returns the nodes of a graph in an order in which every node follows its dependencies. This is
// the order in which they were added if the dependencies allow it. A cycle, which can be created by
// cuGraphAddDependencies, is refused (INVARIANTS.md G2).
std::vector<const Node*> sorted_nodes(const Graph& graph) {
  std::vector<const Node*> sorted;
  std::set<const Node*> done;
  while (sorted.size() < graph.nodes.size()) {
    const size_t before = sorted.size();
    for (auto& node : graph.nodes) {
      const auto& list = node->dependencies;
      if (done.count(node.get()) != 0) continue;
      const bool ready = std::all_of(list.begin(), list.end(),
                                     [&](const Node* other) { return done.count(other) != 0; });
      if (!ready) continue;
      done.insert(node.get());
      sorted.push_back(node.get());
    }
    require(sorted.size() > before, CUDA_ERROR_INVALID_VALUE,
            "the dependencies of the graph's nodes form a cycle");
  }
  return sorted;
}

// Returns the dependencies of the second empty node of a child graph (see append_flat), as indices
// in the flat list: the first empty node (`entry`), and for each node of the child graph the list
// entry on which the node's successors depend (`tail`).
std::vector<unsigned> joined(unsigned entry, const std::map<const Node*, unsigned>& tail) {
  std::vector<unsigned> dependencies{entry};
  for (auto& item : tail) dependencies.push_back(item.second);
  // `tail` is ordered by the addresses of the nodes. Without this sort, two instantiations of the
  // same definition could differ.
  std::sort(dependencies.begin(), dependencies.end());
  return dependencies;
}

// Appends the nodes of a graph to a flat list. The nodes of a child graph are placed between two
// empty nodes. The first empty node has the dependencies of the child graph node, and the
// successors of the child graph node depend on the second one (INVARIANTS.md G4). The root nodes of
// `graph` depend on the list entries with the indices `before`. For each node of `graph`, `tail`
// receives the index of the entry on which the node's successors depend: its own entry or, for a
// child graph node, the second empty node.
void append_flat(const Graph& graph, const std::vector<unsigned>& before,
                 std::vector<FlatNode>* out, References* references,
                 std::map<const Node*, unsigned>* tail) {
  references->merge(*graph.references);
  for (const Node* node : sorted_nodes(graph)) {
    FlatNode flat{node->type, node->work, true, node->handle, {}};
    flat.condition = node->condition;
    flat.condition_type = node->condition_type;
    for (auto& body : node->bodies) {
      std::map<const Node*, unsigned> inner;
      flat.bodies.emplace_back();
      append_flat(*body, {}, &flat.bodies.back(), references, &inner);
    }
    if (node->dependencies.empty()) flat.dependencies = before;
    for (Node* dependency : node->dependencies) {
      flat.dependencies.push_back(tail->at(dependency));
      flat.ports.push_back(node->port(dependency));
    }
    const auto entry = static_cast<unsigned>(out->size());
    (*tail)[node] = entry;
    out->push_back(std::move(flat));
    if (!node->child) continue;
    std::map<const Node*, unsigned> inner;
    append_flat(*node->child, {entry}, out, references, &inner);
    FlatNode join{CU_GRAPH_NODE_TYPE_EMPTY, Work(), true, nullptr, joined(entry, inner)};
    (*tail)[node] = static_cast<unsigned>(out->size());
    out->push_back(std::move(join));
  }
}

bool has_kernel(const std::vector<FlatNode>& flat) {
  for (const FlatNode& node : flat) {
    if (node.type == CU_GRAPH_NODE_TYPE_KERNEL) return true;
    for (const auto& body : node.bodies) {
      if (has_kernel(body)) return true;
    }
  }
  return false;
}

// Creates the work of a conditional node. `top` is the program of the whole graph. When a launch of
// `top` begins, it sets the node's condition to the default value of the handle or, if there is
// none, to a pseudorandom value (INVARIANTS.md N3).
Work conditional_work(const FlatNode& node, Program* top) {
  auto work = std::make_shared<ConditionalWork>();
  work->type = node.condition_type;
  work->cell = node.condition->cell;
  work->endless = node.condition_type == CU_GRAPH_COND_TYPE_WHILE && !has_kernel(node.bodies[0]);
  if (node.condition->assign) {
    top->defaults.emplace_back(&node.condition->cell->value, node.condition->initial);
  } else {
    top->undefined_conditions.push_back(&node.condition->cell->value);
  }
  for (const auto& body : node.bodies) work->bodies.push_back(make_program(body, nullptr, top));
  return Work(std::shared_ptr<const ConditionalWork>(std::move(work)));
}

// Compares the nodes `now` of an executable graph with the nodes `after` of a definition. Returns
// the CUgraphExecUpdateResult SUCCESS if the executable graph can be updated to the definition.
// Otherwise returns the reason, and sets `error_node` to the first node that differs, or to null if
// the numbers of nodes differ.
int compare_topology(const std::vector<FlatNode>& after, const std::vector<FlatNode>& now,
                     void** error_node) {
  *error_node = nullptr;
  if (after.size() != now.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  for (size_t i = 0; i < after.size(); ++i) {
    *error_node = after[i].source;
    if (after[i].dependencies != now[i].dependencies || after[i].ports != now[i].ports) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    if (after[i].type != now[i].type) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    if (after[i].work.memory || after[i].condition_type != now[i].condition_type ||
        after[i].bodies.size() != now[i].bodies.size()) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    }
    for (size_t b = 0; b < after[i].bodies.size(); ++b) {
      const int r = compare_topology(after[i].bodies[b], now[i].bodies[b], error_node);
      if (r != CU_GRAPH_EXEC_UPDATE_SUCCESS) return r;
    }
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

// Replaces the work of `n` nodes of an executable graph. The nodes stay enabled or disabled as they
// are, and callers still address them by the handles of the original definition.
void move_work(FlatNode* now, FlatNode* after, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    now[i].work = std::move(after[i].work);
    now[i].condition = std::move(after[i].condition);
    for (size_t b = 0; b < now[i].bodies.size(); ++b) {
      auto& body = now[i].bodies[b];
      move_work(body.data(), after[i].bodies[b].data(), body.size());
    }
  }
}

// Returns the flat list of a graph's nodes and collects its user-object references.
std::vector<FlatNode> flatten(const Graph& graph, References* references) {
  check_conditions(graph, false);
  std::vector<FlatNode> flat;
  std::map<const Node*, unsigned> tail;
  append_flat(graph, {}, &flat, references, &tail);
  return flat;
}

}  // namespace

// Makes the nodes of a conditional body run one after another (SOFTCUDA_BODY). Each node runs after
// the nodes on which it depends. Of the nodes that could run next, the first one in the definition
// is chosen or, with `reverse`, the last one.
static void run_in_sequence(Program* body, bool reverse) {
  std::vector<unsigned> order;
  std::set<unsigned> ready(body->roots.begin(), body->roots.end());
  std::vector<int> pending;
  for (auto& node : body->nodes) pending.push_back(node->indegree);
  while (!ready.empty()) {
    const auto chosen = reverse ? std::prev(ready.end()) : ready.begin();
    const unsigned index = *chosen;
    order.push_back(index);
    ready.erase(chosen);
    for (unsigned next : body->nodes[index]->next) {
      if (--pending[next] == 0) ready.insert(next);
    }
  }
  body->roots.clear();
  if (!order.empty()) body->roots.push_back(order.front());
  for (size_t i = 0; i < order.size(); ++i) {
    Op& node = *body->nodes[order[i]];
    node.indegree = i == 0 ? 0 : 1;
    node.next.clear();
    if (i + 1 < order.size()) node.next.push_back(order[i + 1]);
  }
}

std::shared_ptr<Program> make_program(const std::vector<FlatNode>& flat,
                                      const std::shared_ptr<References>& references, Program* top) {
  auto program = std::make_shared<Program>();
  program->references = references;
  if (top == nullptr) top = program.get();
  program->nodes.reserve(flat.size());
  for (const FlatNode& node : flat) {
    auto op = std::make_unique<Op>();
    if (node.enabled) op->work = node.condition ? conditional_work(node, top) : node.work;
    op->program = program.get();
    if (op->work.event) {
      op->event_slot = static_cast<unsigned>(program->event_nodes.size());
      program->event_nodes.push_back(op.get());
    }
    if (op->work.memory) program->memory_nodes.push_back(op.get());
    op->indegree = static_cast<int>(node.dependencies.size());
    program->nodes.push_back(std::move(op));
  }
  for (unsigned i = 0; i < flat.size(); ++i) {
    if (flat[i].dependencies.empty()) program->roots.push_back(i);
    for (unsigned d : flat[i].dependencies) program->nodes[d]->next.push_back(i);
    for (size_t k = 0; k < flat[i].ports.size(); ++k) {
      if (flat[i].ports[k] == 0) continue;
      Op& primary = *program->nodes[flat[i].dependencies[k]];
      primary.precedes_programmatically = true;
      program->nodes[i]->primaries.push_back(&primary);
    }
  }
  const BodyOrder order = settings().body_order;
  if (top != program.get() && order != BodyOrder::concurrent) {
    run_in_sequence(program.get(), order == BodyOrder::reverse);
  }
  return program;
}

std::shared_ptr<Graph> graph_of(const Exec& exec) {
  require(exec.program->memory_nodes.empty(), CUDA_ERROR_NOT_SUPPORTED,
          "the launch of a graph with memory nodes cannot be captured");
  auto graph = std::make_shared<Graph>();
  graph->references = std::make_shared<References>(*exec.references);
  for (const FlatNode& flat : exec.flat) {
    auto node = std::make_shared<Node>();
    node->graph = graph.get();
    node->type = flat.type;
    if (flat.type == CU_GRAPH_NODE_TYPE_GRAPH || !flat.enabled) {
      node->type = CU_GRAPH_NODE_TYPE_EMPTY;
    } else {
      node->work = flat.work;
    }
    node->handle = graph_nodes.add(node);
    graph->nodes.push_back(std::move(node));
  }
  for (size_t i = 0; i < exec.flat.size(); ++i) {
    for (unsigned d : exec.flat[i].dependencies) {
      graph->nodes[i]->dependencies.push_back(graph->nodes[d].get());
    }
  }
  return graph;
}

static void instantiate(CUgraphExec* out, CUgraph handle, uint64_t flags) {
  const auto graph = graphs.find(handle);
  require(out != nullptr && flags <= 15);
  require_not_capturing(*graph);
  require_standalone(*graph);
  require((flags & 4) == 0, CUDA_ERROR_NOT_SUPPORTED, "device graph launch is not implemented");
  auto exec = std::make_shared<Exec>();
  exec->flags = flags;
  exec->references = std::make_shared<References>();
  std::lock_guard<std::mutex> lock(graph_mutex);
  if (has_memory_node(*graph)) {
    require(graph->instance.expired(), CUDA_ERROR_NOT_SUPPORTED,
            "a graph with memory nodes can have only one executable graph at a time");
    graph->instance = exec;
  }
  exec->flat = flatten(*graph, exec->references.get());
  exec->program = make_program(exec->flat, exec->references);
  exec->handle = graph_execs.add(exec);
  *out = static_cast<CUgraphExec>(exec->handle);
}

// Whether the node is in a conditional body of the executable graph.
static bool is_in_body(const Exec& exec, const FlatNode& node) {
  const std::less<const FlatNode*> before;
  const FlatNode* const first = exec.flat.data();
  return before(&node, first) || !before(&node, first + exec.flat.size());
}

// Applies the change of one node to the program of the executable graph. The change must not affect
// queued launches, which keep the program with which they were queued (INVARIANTS.md G5). If there
// are such launches, or if the node is in a conditional body, a new program is created. Otherwise
// the node of the program is changed in place.
static void replace_work(Exec& exec, const FlatNode& changed) {
  const FlatNode* const first = exec.flat.data();
  if (is_in_body(exec, changed) ||
      exec.program->launches_in_flight.load(std::memory_order_acquire) != 0) {
    exec.program = make_program(exec.flat, exec.references);
    return;
  }
  exec.program->nodes[static_cast<size_t>(&changed - first)]->work =
      changed.enabled ? changed.work : Work();
}

static FlatNode* find_source(std::vector<FlatNode>* flat, const void* source) {
  for (FlatNode& node : *flat) {
    if (node.source == source) return &node;
    for (auto& body : node.bodies) {
      if (FlatNode* found = find_source(&body, source)) return found;
    }
  }
  return nullptr;
}

// Returns the node of the executable graph that was created from a node of the definition.
static FlatNode* find_flat(Exec& exec, CUgraphNode node) {
  FlatNode* const flat = node == nullptr ? nullptr : find_source(&exec.flat, node);
  require(flat != nullptr, CUDA_ERROR_INVALID_VALUE,
          "the executable graph was not instantiated from this node's graph");
  return flat;
}

// Replaces the work of the nodes of a child graph with the work of the nodes of `child_handle`,
// which must have the same topology.
static void set_exec_child(Exec& exec, CUgraphNode node, CUgraph child_handle) {
  InlineDestructorScope inline_destructors;
  const auto child = graphs.find(child_handle);
  require_not_capturing(*child);
  // The old program and references are destroyed after the mutex is released.
  std::shared_ptr<Program> old;
  std::shared_ptr<References> old_references;
  std::lock_guard<std::mutex> lock(graph_mutex);
  FlatNode* const flat = find_flat(exec, node);
  require(flat->type == kGraph, CUDA_ERROR_INVALID_VALUE, "the node is not a child graph node");
  require(!is_in_body(exec, *flat), CUDA_ERROR_NOT_SUPPORTED,
          "updates of child graphs in a conditional body are not implemented");
  check_conditions(*child, false);

  // Copy the list of nodes up to the child graph node and append the new nodes to the copy. They
  // then have the same indices as the nodes that they replace.
  const auto entry = static_cast<unsigned>(flat - exec.flat.data());
  auto references = std::make_shared<References>(*exec.references);
  std::vector<FlatNode> after(exec.flat.begin(), exec.flat.begin() + entry + 1);
  std::map<const Node*, unsigned> tail;
  append_flat(*child, {entry}, &after, references.get(), &tail);
  const size_t first = entry + 1;
  const size_t end = after.size();
  const bool fits = end < exec.flat.size() && exec.flat[end].dependencies == joined(entry, tail);
  void* error_node = nullptr;
  require(fits && compare_topology({after.begin() + static_cast<long>(first), after.end()},
                                   {exec.flat.begin() + static_cast<long>(first),
                                    exec.flat.begin() + static_cast<long>(end)},
                                   &error_node) == CU_GRAPH_EXEC_UPDATE_SUCCESS,
          CUDA_ERROR_INVALID_VALUE, "the topology of the child graph differs");
  move_work(exec.flat.data() + first, after.data() + first, end - first);
  old = std::move(exec.program);
  old_references = std::move(exec.references);
  exec.references = references;
  exec.program = make_program(exec.flat, references);
}

void set_exec_params(CUgraphExec handle, CUgraphNode node, const Params& params) {
  const auto exec = graph_execs.find(handle);
  if (params.type == kGraph) {
    set_exec_child(*exec, node, params.graph.graph);
    return;
  }
  Work work = build_work(params);
  std::lock_guard<std::mutex> lock(graph_mutex);
  FlatNode* const flat = find_flat(*exec, node);
  if (flat->type != params.type) {
    refuse(CUDA_ERROR_INVALID_VALUE, std::string("expected a node of type ") +
                                         type_name(params.type) + ", but its type is " +
                                         type_name(flat->type));
  }
  check_same_operations(flat->work, work);
  if (is_in_body(*exec, *flat)) check_in_body(work);
  flat->work = std::move(work);
  replace_work(*exec, *flat);
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuGraphInstantiateWithFlags, 11040, 0, CUgraphExec*, out, CUgraph, graph, unsigned long long,
       flags) {
  instantiate(out, graph, flags);
}

SC_API(cuGraphInstantiateWithParams, 12000, 0, CUgraphExec*, out, CUgraph, graph,
       CUDA_GRAPH_INSTANTIATE_PARAMS*, params) {
  require(params != nullptr);
  params->hErrNode_out = nullptr;
  params->result_out = 1;  // CUDA_GRAPH_INSTANTIATE_ERROR, for the case that the call fails
  instantiate(out, graph, params->flags);
  params->result_out = 0;
}

SC_API(cuGraphExecGetFlags, 12000, 0, CUgraphExec, handle, uint64_t*, flags) {
  const auto exec = graph_execs.find(handle);
  require(flags != nullptr);
  *flags = exec->flags;
}

// Uploading does no work on this device. It only waits for earlier launches of the executable
// graph.
SC_API(cuGraphUpload, 11010, 0, CUgraphExec, handle, CUstream, stream_handle) {
  const auto exec = graph_execs.find(handle);
  const auto stream = find_stream(stream_handle);
  capture_reject_stream_sync(stream_handle);
  enqueue(*stream, Work(), OpRef(), &exec->last);
}

// Whether a program contains a host node.
static bool calls_host(const Program& program) {
  for (auto& node : program.nodes) {
    if (node->work.kind == WorkKind::host) return true;
  }
  return false;
}

SC_API(cuGraphLaunch, 10000, 0, CUgraphExec, handle, CUstream, stream_handle) {
  const auto exec = graph_execs.find(handle);
  const auto stream = find_stream(stream_handle);
  restore_fault_handlers();
  Work work;
  work.kind = WorkKind::graph;
  {
    std::lock_guard<std::mutex> lock(graph_mutex);
    work.program = launch_reference(exec->program);
  }
  if (capture_launch(stream_handle, *exec)) return;
  for (const Op* node : work.program->event_nodes) {
    require(!node->work.event->destroyed.load(), CUDA_ERROR_INVALID_HANDLE,
            "an event of the graph's event nodes was destroyed");
  }
  submit_graph_memory(*work.program, (exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE) != 0);
  count_add(Counter::graph_launch);
  work.events = launch_events(*work.program);
  const bool host = (settings().lock_model & 2) != 0 && calls_host(*work.program);
  const OpRef launch = enqueue(*stream, std::move(work), OpRef(), &exec->last);
  if (host) store(stream->host, launch);
  finish_launch(launch);
}

SC_API(cuGraphExecDestroy, 10000, 0, CUgraphExec, handle) {
  InlineDestructorScope inline_destructors;
  graph_execs.remove(handle);
}

// Replaces the parameters and user-object references of an executable graph with those of a
// definition with the same topology. The old references are released when the launches that were
// queued with them are complete.
SC_API(cuGraphExecUpdate_v2, 12000, 0, CUgraphExec, handle, CUgraph, graph_handle,
       CUgraphExecUpdateResultInfo*, info) {
  InlineDestructorScope inline_destructors;
  const auto exec = graph_execs.find(handle);
  const auto graph = graphs.find(graph_handle);
  require(info != nullptr);
  require_standalone(*graph);
  *info = CUgraphExecUpdateResultInfo{CU_GRAPH_EXEC_UPDATE_ERROR, nullptr, nullptr};
  auto references = std::make_shared<References>();
  std::vector<FlatNode> flat;
  std::shared_ptr<Program> old;
  std::shared_ptr<References> old_references;
  std::lock_guard<std::mutex> lock(graph_mutex);
  flat = flatten(*graph, references.get());
  void* error_node = nullptr;
  info->result = compare_topology(flat, exec->flat, &error_node);
  if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
    info->errorNode = static_cast<CUgraphNode>(error_node);
    const char* reason =
        "the type or the number of bodies of a conditional node changed, or a node allocates or "
        "frees memory";
    if (info->result == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED) {
      reason = "the number of nodes or an edge changed";
    } else if (info->result == CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED) {
      reason = "the type of a node changed";
    }
    refuse(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, reason);
  }
  move_work(exec->flat.data(), flat.data(), flat.size());
  old = std::move(exec->program);
  old_references = std::move(exec->references);
  exec->references = references;
  exec->program = make_program(exec->flat, references);
}

// Only kernel, memset and memcpy nodes can be disabled, as documented.
SC_API(cuGraphNodeSetEnabled, 11060, 0, CUgraphExec, handle, CUgraphNode, node, unsigned, enabled) {
  const auto exec = graph_execs.find(handle);
  std::lock_guard<std::mutex> lock(graph_mutex);
  FlatNode* const flat = find_flat(*exec, node);
  require(flat->type <= CU_GRAPH_NODE_TYPE_MEMSET, CUDA_ERROR_INVALID_VALUE,
          "only kernel, memcpy and memset nodes can be disabled");
  flat->enabled = enabled != 0;
  replace_work(*exec, *flat);
}

SC_API(cuGraphNodeGetEnabled, 11060, 0, CUgraphExec, handle, CUgraphNode, node, unsigned*,
       enabled) {
  const auto exec = graph_execs.find(handle);
  require(enabled != nullptr);
  std::lock_guard<std::mutex> lock(graph_mutex);
  *enabled = find_flat(*exec, node)->enabled;
}
