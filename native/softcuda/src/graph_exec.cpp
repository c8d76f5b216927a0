// Executables: flattening, launching, updating (invariants G3-G6).
#include <algorithm>
#include <functional>

#include "capture.h"
#include "conditionals.h"
#include "graphs.h"
#include "memops.h"
#include "modules.h"

namespace softcuda {

Handles<Exec>& graph_execs() {
  static Handles<Exec>& h = *new Handles<Exec>(0x57000000000000);
  return h;
}

Exec::Exec() { live_add(Kind::graph_exec, 1); }
Exec::~Exec() { live_add(Kind::graph_exec, -1); }

namespace {

// A child's nodes are placed between two empty ones, which carry its dependencies.
void place(const Graph& graph, const std::vector<unsigned>& before, std::vector<FlatNode>* out,
           References* references, std::map<const Node*, unsigned>* tail) {
  references->merge(*graph.references);
  // Definition order may name later nodes (AddDependencies), so indices are given first.
  std::map<const Node*, unsigned> head;
  std::vector<std::pair<const Node*, unsigned>> children;
  for (auto& node : graph.nodes) {
    FlatNode flat{node->type, node->work, true, node->handle, {}};
    flat.condition = node->condition;
    flat.condition_type = node->condition_type;
    for (auto& body : node->bodies) {
      std::map<const Node*, unsigned> inner;
      flat.bodies.emplace_back();
      place(*body, {}, &flat.bodies.back(), references, &inner);
    }
    if (node->dependencies.empty()) flat.dependencies = before;
    head[node.get()] = static_cast<unsigned>(out->size());
    (*tail)[node.get()] = static_cast<unsigned>(out->size());
    out->push_back(std::move(flat));
    if (!node->child) continue;
    const unsigned entry = static_cast<unsigned>(out->size() - 1);
    std::map<const Node*, unsigned> inner;
    place(*node->child, {entry}, out, references, &inner);
    FlatNode join{CU_GRAPH_NODE_TYPE_EMPTY, Work(), true, nullptr, {entry}};
    for (auto& item : inner) join.dependencies.push_back(item.second);
    // The map is ordered by address; two definitions of one shape must come out the same.
    std::sort(join.dependencies.begin(), join.dependencies.end());
    (*tail)[node.get()] = static_cast<unsigned>(out->size());
    out->push_back(std::move(join));
  }
  for (auto& node : graph.nodes) {
    for (Node* dependency : node->dependencies) {
      (*out)[head[node.get()]].dependencies.push_back((*tail)[dependency]);
    }
  }
}

bool acyclic(const std::vector<FlatNode>& flat) {
  std::vector<unsigned> left(flat.size()), ready;
  std::vector<std::vector<unsigned>> next(flat.size());
  for (unsigned i = 0; i < flat.size(); ++i) {
    left[i] = static_cast<unsigned>(flat[i].dependencies.size());
    if (left[i] == 0) ready.push_back(i);
    for (unsigned d : flat[i].dependencies) next[d].push_back(i);
  }
  for (size_t done = 0; done < ready.size(); ++done) {
    for (unsigned n : next[ready[done]]) {
      if (--left[n] == 0) ready.push_back(n);
    }
  }
  if (ready.size() != flat.size()) return false;
  for (const FlatNode& node : flat) {
    for (const auto& body : node.bodies) {
      if (!acyclic(body)) return false;
    }
  }
  return true;
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

// What a conditional node does; its bodies' conditions get their defaults from `top`.
Work conditional_work(const FlatNode& node, Program* top) {
  auto made = std::make_shared<ConditionalWork>();
  made->type = node.condition_type;
  made->cell = node.condition->cell;
  made->endless = node.condition_type == CU_GRAPH_COND_TYPE_WHILE && !has_kernel(node.bodies[0]);
  if (node.condition->assign) {
    top->defaults.emplace_back(&node.condition->cell->value, node.condition->initial);
  }
  for (const auto& body : node.bodies) made->bodies.push_back(make_program(body, nullptr, top));
  Work work;
  work.kind = WorkKind::conditional;
  work.conditional = std::move(made);
  return work;
}

// Whether an executable of `now` can take over what `after` does, and which node is to blame.
int same_shape(const std::vector<FlatNode>& after, const std::vector<FlatNode>& now, void** blame) {
  *blame = nullptr;
  if (after.size() != now.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  for (size_t i = 0; i < after.size(); ++i) {
    *blame = after[i].source;
    if (after[i].dependencies != now[i].dependencies) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    if (after[i].type != now[i].type) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    if (after[i].condition_type != now[i].condition_type ||
        after[i].bodies.size() != now[i].bodies.size()) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    }
    for (size_t b = 0; b < after[i].bodies.size(); ++b) {
      const int r = same_shape(after[i].bodies[b], now[i].bodies[b], blame);
      if (r != CU_GRAPH_EXEC_UPDATE_SUCCESS) return r;
    }
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

// Enabled states and node identities stay.
void take_work(std::vector<FlatNode>* now, std::vector<FlatNode>* after) {
  for (size_t i = 0; i < now->size(); ++i) {
    (*now)[i].work = std::move((*after)[i].work);
    (*now)[i].condition = std::move((*after)[i].condition);
    for (size_t b = 0; b < (*now)[i].bodies.size(); ++b) {
      take_work(&(*now)[i].bodies[b], &(*after)[i].bodies[b]);
    }
  }
}

}  // namespace

CUresult flatten(const Graph& graph, std::vector<FlatNode>* out, References* references) {
  if (CUresult r = check_conditions(graph, false); r != CUDA_SUCCESS) return r;
  std::map<const Node*, unsigned> tail;
  place(graph, {}, out, references, &tail);
  if (acyclic(*out)) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, "the graph has a cycle");
}

std::shared_ptr<Program> make_program(const std::vector<FlatNode>& flat,
                                      const std::shared_ptr<References>& references, Program* top) {
  auto program = std::make_shared<Program>();
  program->keep = references;
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
    op->indegree = static_cast<int>(node.dependencies.size());
    program->nodes.push_back(std::move(op));
  }
  for (unsigned i = 0; i < flat.size(); ++i) {
    if (flat[i].dependencies.empty()) program->roots.push_back(i);
    for (unsigned d : flat[i].dependencies) program->nodes[d]->next.push_back(i);
  }
  return program;
}

std::shared_ptr<Graph> graph_of(const Exec& exec) {
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
    node->handle = graph_nodes().add(node);
    graph->nodes.push_back(std::move(node));
  }
  for (size_t i = 0; i < exec.flat.size(); ++i) {
    for (unsigned d : exec.flat[i].dependencies) {
      graph->nodes[i]->dependencies.push_back(graph->nodes[d].get());
    }
  }
  return graph;
}

static CUresult instantiate(CUgraphExec* out, CUgraph handle, uint64_t flags) {
  std::shared_ptr<Graph> graph = graphs().get(handle);
  if (!graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a graph");
  if (out == nullptr || flags > 15) return CUDA_ERROR_INVALID_VALUE;
  if (graph->captures.load() > 0) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "a stream is capturing into the graph");
  }
  if (graph->moved || graph->body_of != nullptr) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the graph belongs to a node of another graph");
  }
  if ((flags & 4) != 0) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "graphs launched from the device are not implemented");
  }
  auto exec = std::make_shared<Exec>();
  exec->flags = flags;
  exec->references = std::make_shared<References>();
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (CUresult r = flatten(*graph, &exec->flat, exec->references.get()); r != CUDA_SUCCESS)
    return r;
  exec->program = make_program(exec->flat, exec->references);
  exec->handle = graph_execs().add(exec);
  *out = static_cast<CUgraphExec>(exec->handle);
  return CUDA_SUCCESS;
}

// Launches already queued keep the plan they were queued with (G5): while one does, an update
// makes a new plan; otherwise the node is changed in place.
static void replace_work(Exec& exec, const FlatNode& changed) {
  const std::less<const FlatNode*> before;
  const FlatNode* const first = exec.flat.data();
  const bool nested = before(&changed, first) || !before(&changed, first + exec.flat.size());
  if (nested || exec.program->flights.load(std::memory_order_acquire) != 0) {
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

// The executable's copy of a definition's node, checked to be of `type`.
static CUresult find_flat(CUgraphExec handle, CUgraphNode node, int type,
                          std::shared_ptr<Exec>* exec, FlatNode** out) {
  *exec = graph_execs().get(handle);
  if (!*exec) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an executable graph");
  *out = node == nullptr ? nullptr : find_source(&(*exec)->flat, node);
  if (*out == nullptr) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the executable was not made from this node's graph");
  }
  if (type < 0 || (*out)->type == type) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, "the node has another type");
}

CUresult set_exec_work(CUgraphExec handle, CUgraphNode node, CUgraphNodeType type, Work work) {
  std::shared_ptr<Exec> exec;
  FlatNode* flat = nullptr;
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (CUresult r = find_flat(handle, node, type, &exec, &flat); r != CUDA_SUCCESS) return r;
  if (type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP && !same_operations(flat->work, work)) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the count or kinds of the operations changed");
  }
  flat->work = std::move(work);
  replace_work(*exec, *flat);
  return CUDA_SUCCESS;
}

}  // namespace softcuda

using namespace softcuda;

SC_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph,
                                               unsigned long long flags) {
  SC_API(cuGraphInstantiate, 0);
  return instantiate(out, graph, flags);
}

SC_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph,
                                                CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  SC_API(cuGraphInstantiateWithParams, 0);
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  params->hErrNode_out = nullptr;
  const CUresult r = instantiate(out, graph, params->flags);
  params->result_out = r == CUDA_SUCCESS ? 0 : 1;
  return r;
}

SC_EXPORT CUresult cuGraphExecGetFlags(CUgraphExec handle, uint64_t* flags) {
  SC_API(cuGraphExecGetFlags, 0);
  std::shared_ptr<Exec> exec = graph_execs().get(handle);
  if (!exec) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an executable graph");
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = exec->flags;
  return CUDA_SUCCESS;
}

// Uploading is ordered after the executable's earlier launches and costs nothing here.
SC_EXPORT CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
  SC_API(cuGraphUpload, 0);
  std::shared_ptr<Exec> exec = graph_execs().get(handle);
  std::shared_ptr<Stream> stream = find_stream(stream_handle);
  if (!exec || !stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an executable or no stream");
  if (CUresult r = capture_forbids_stream(stream_handle); r != CUDA_SUCCESS) return r;
  enqueue(*stream, Work(), OpRef(), &exec->last);
  return CUDA_SUCCESS;
}

static bool calls_host(const Program& program) {
  for (auto& node : program.nodes) {
    if (node->work.kind == WorkKind::host) return true;
  }
  return false;
}

SC_EXPORT CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  SC_API(cuGraphLaunch, 0);
  std::shared_ptr<Exec> exec = graph_execs().get(handle);
  std::shared_ptr<Stream> stream = find_stream(stream_handle);
  if (!exec || !stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an executable or no stream");
  keep_fault_handlers();
  Work work;
  work.kind = WorkKind::graph;
  {
    std::lock_guard<std::mutex> lock(graph_mutex());
    work.program = in_flight(exec->program);
  }
  if (auto r = capture_launch(stream_handle, *exec)) return *r;
  for (const Op* node : work.program->event_nodes) {
    if (node->work.event->destroyed.load()) {
      return refuse(CUDA_ERROR_INVALID_HANDLE, "an event that the graph uses was destroyed");
    }
  }
  count_add(What::graph_launch);
  work.events = launch_events(*work.program);
  const bool host = (settings().lock_model & 2) != 0 && calls_host(*work.program);
  const OpRef launch = enqueue(*stream, std::move(work), OpRef(), &exec->last);
  if (host) remember_host(*stream, launch);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphExecDestroy(CUgraphExec handle) {
  SC_API(cuGraphExecDestroy, 0);
  ApiThread here;
  std::shared_ptr<Exec> exec = graph_execs().take(handle);
  if (!exec) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an executable graph");
  return CUDA_SUCCESS;
}

// Takes parameters and references of another definition with the same topology. References of the
// old one live until the launches queued with them have ended.
SC_EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graph_handle,
                                        CUgraphExecUpdateResultInfo* info) {
  SC_API(cuGraphExecUpdate, 0);
  ApiThread here;
  std::shared_ptr<Exec> exec = graph_execs().get(handle);
  std::shared_ptr<Graph> graph = graphs().get(graph_handle);
  if (!exec || !graph) return refuse(CUDA_ERROR_INVALID_HANDLE, "not an executable or no graph");
  if (info == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (graph->moved) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "the graph belongs to a node of another graph");
  }
  *info = CUgraphExecUpdateResultInfo{CU_GRAPH_EXEC_UPDATE_SUCCESS, nullptr, nullptr};
  auto references = std::make_shared<References>();
  std::vector<FlatNode> flat;
  std::shared_ptr<Program> old;
  std::shared_ptr<References> old_references;
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (CUresult r = flatten(*graph, &flat, references.get()); r != CUDA_SUCCESS) return r;
  const auto failed = [&](int result, void* node, const char* why) {
    info->result = result;
    info->errorNode = static_cast<CUgraphNode>(node);
    return refuse(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, why);
  };
  void* blame = nullptr;
  const int shape = same_shape(flat, exec->flat, &blame);
  if (shape == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED) {
    return failed(shape, blame, "the number of nodes or an edge changed");
  }
  if (shape == CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED) {
    return failed(shape, blame, "a node's type changed");
  }
  if (shape != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
    return failed(shape, blame, "a conditional's type or number of bodies changed");
  }
  take_work(&exec->flat, &flat);
  old = std::move(exec->program);
  old_references = std::move(exec->references);
  exec->references = references;
  exec->program = make_program(exec->flat, references);
  return CUDA_SUCCESS;
}

// Kernel, memset and memcpy nodes only, as documented.
SC_EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec handle, CUgraphNode node, unsigned enabled) {
  SC_API(cuGraphNodeSetEnabled, 0);
  std::shared_ptr<Exec> exec;
  FlatNode* flat = nullptr;
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (CUresult r = find_flat(handle, node, -1, &exec, &flat); r != CUDA_SUCCESS) return r;
  if (flat->type > CU_GRAPH_NODE_TYPE_MEMSET) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "only kernel, memcpy and memset nodes can be disabled");
  }
  flat->enabled = enabled != 0;
  replace_work(*exec, *flat);
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode node, unsigned* enabled) {
  SC_API(cuGraphNodeGetEnabled, 0);
  std::shared_ptr<Exec> exec;
  FlatNode* flat = nullptr;
  std::lock_guard<std::mutex> lock(graph_mutex());
  if (CUresult r = find_flat(handle, node, -1, &exec, &flat); r != CUDA_SUCCESS) return r;
  if (enabled == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *enabled = flat->enabled;
  return CUDA_SUCCESS;
}
