// Graph definitions, executables and user objects.
#pragma once

#include <array>
#include <map>

#include "scheduler.h"

namespace softcuda {

// ---- user objects (invariants U1-U4) ----------------------------------------------------------
struct UserObject {
  void* handle = nullptr;
  void* data = nullptr;
  CUhostFn destroy = nullptr;
  std::atomic<unsigned> refs{0};
};

// References that one graph or executable holds; released together.
class References {
 public:
  References() = default;
  References(const References& other);  // takes its own references, same multiplicity
  References& operator=(const References&) = delete;
  ~References();
  void add(const std::shared_ptr<UserObject>& object, unsigned count, bool take_new);
  bool release(const std::shared_ptr<UserObject>& object, unsigned count);
  void merge(const References& other);

 private:
  std::map<std::shared_ptr<UserObject>, unsigned> held_;
};

// Marks a call during which inline destructors may run (mode SOFTCUDA_DESTRUCTORS=inline).
class ApiThread {
 public:
  ApiThread();
  ~ApiThread();

 private:
  bool outer_;
};

// ---- graphs (invariants G1-G6) ----------------------------------------------------------------
struct Graph;
struct Condition;

constexpr size_t kAttributeBytes = 64;  // CUlaunchAttributeValue

struct Node {
  void* handle = nullptr;
  Graph* graph = nullptr;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  Work work;
  std::vector<void*> param_pointers;  // what cuGraphKernelNodeGetParams hands out
  std::map<int, std::array<char, kAttributeBytes>> attributes;  // of a kernel node
  std::shared_ptr<Graph> child;
  // Of a conditional node.
  std::shared_ptr<Condition> condition;
  int condition_type = 0;
  std::vector<std::shared_ptr<Graph>> bodies;
  std::vector<CUgraph> body_handles;
  std::vector<Node*> dependencies;
  std::map<const Node*, unsigned char> ports;  // of programmatic edges, by where they come from
  unsigned char port(const Node* from) const { return ports.count(from) ? ports.at(from) : 0; }
};

struct Graph {
  Graph();
  ~Graph();
  void* handle = nullptr;
  std::vector<std::shared_ptr<Node>> nodes;
  std::shared_ptr<References> references = std::make_shared<References>();
  Graph* body_of = nullptr;  // of a conditional's body: the graph the conditional is in
  bool moved = false;        // into a parent, which owns it (G7)
  std::vector<std::shared_ptr<Condition>> conditions;
  std::atomic<int> captures{0};  // stream captures that go on into this graph
};

// One node of a flattened graph: children expanded, dependencies as indices.
struct FlatNode {
  CUgraphNodeType type;
  Work work;
  bool enabled = true;
  void* source = nullptr;  // handle of the definition's node, for SetParams
  std::vector<unsigned> dependencies;
  std::vector<unsigned char> ports{};  // of programmatic edges; 0: a full one
  // Of a conditional node.
  std::shared_ptr<Condition> condition{};
  int condition_type = 0;
  std::vector<std::vector<FlatNode>> bodies{};
};

struct Exec {
  Exec();
  ~Exec();
  void* handle = nullptr;
  uint64_t flags = 0;
  std::vector<FlatNode> flat;
  std::shared_ptr<Program> program;
  std::shared_ptr<References> references;
  OpRef last;  // launches of one executable are serialised; guarded by the scheduler's mutex
};

// Guards definitions and executables. The driver leaves that to callers; we do not crash.
inline std::mutex& graph_mutex = *new std::mutex;
inline Handles<Graph>& graphs = *new Handles<Graph>(0x55000000000000, "not a graph");
inline Handles<Node>& graph_nodes = *new Handles<Node>(0x56000000000000, "not a graph node");
inline Handles<Exec>& graph_execs = *new Handles<Exec>(0x57000000000000, "not an executable graph");

// Adds a node of any type but child graphs and conditionals.
void add_params(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                const CUgraphNodeParams& params);
CUgraphNodeType type_of(WorkKind kind);
const char* type_name(CUgraphNodeType type);
void need_uncaptured(const Graph& graph);
void need_own(const Graph& graph);  // no child that was moved, no body
std::shared_ptr<Graph> clone_graph(const Graph& graph);
// The executable's graph as a definition, with its present parameters.
std::shared_ptr<Graph> graph_of(const Exec& exec);
// Takes a definition and the handles of its child graphs away from callers; null if unknown.
std::shared_ptr<Graph> take_graph(CUgraph handle);
// Adds a node whose work is complete; nothing is added on failure.
void add_node(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t n,
              std::shared_ptr<Node> node);
std::shared_ptr<Program> make_program(const std::vector<FlatNode>& flat,
                                      const std::shared_ptr<References>& references,
                                      Program* top = nullptr);

}  // namespace softcuda
