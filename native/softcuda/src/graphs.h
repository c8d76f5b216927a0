// Graph definitions (CUgraph), executable graphs (CUgraphExec) and user objects.
#pragma once

#include <array>
#include <map>

#include "scheduler.h"

namespace softcuda {

// ---- user objects (INVARIANTS.md U1 to U4) ----------------------------------------------------
struct UserObject {
  void* handle = nullptr;
  void* data = nullptr;
  CUhostFn destroy = nullptr;
  std::atomic<unsigned> refs{0};
};

// User-object references of one graph or executable graph. The destructor releases all of them.
class References {
 public:
  References() = default;
  References(const References& other);  // acquires as many references as `other` holds
  References& operator=(const References&) = delete;
  ~References();
  // Adds references to a user object. With `acquire`, the reference count of the object is
  // increased. Otherwise the caller transfers references that it owns.
  void add(const std::shared_ptr<UserObject>& object, unsigned count, bool acquire);
  // Returns false if fewer than `count` references are held.
  bool release(const std::shared_ptr<UserObject>& object, unsigned count);
  // Acquires as many references as `other` holds.
  void merge(const References& other);

 private:
  std::map<std::shared_ptr<UserObject>, unsigned> held_;
};

// Allows inline destructors. While an object of this class exists and SOFTCUDA_DESTRUCTORS=inline
// is set, the destructors of user objects run on the current thread (INVARIANTS.md U3).
class InlineDestructorScope {
 public:
  InlineDestructorScope();
  ~InlineDestructorScope();

 private:
  bool outer_;
};

// ---- graphs (INVARIANTS.md G1 to G9) ----------------------------------------------------------
struct Graph;
struct Condition;

constexpr size_t kAttributeBytes = 64;  // CUlaunchAttributeValue

// A node of a graph definition.
struct Node {
  void* handle = nullptr;
  // If this node was cloned: the handle of the original node.
  void* original = nullptr;
  Graph* graph = nullptr;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  Work work;
  // The array that cuGraphKernelNodeGetParams returns as kernelParams.
  std::vector<void*> param_pointers;
  // Attributes of a kernel node, by their number.
  std::map<int, std::array<char, kAttributeBytes>> attributes;
  // The child graph of a child graph node.
  std::shared_ptr<Graph> child;
  // The next four members are used by conditional nodes only.
  std::shared_ptr<Condition> condition;
  int condition_type = 0;
  std::vector<std::shared_ptr<Graph>> bodies;
  std::vector<CUgraph> body_handles;
  std::vector<Node*> dependencies;
  // For each programmatic edge to this node: the source node and the port of the source from which
  // the edge starts (INVARIANTS.md G9). All other edges are full dependencies, which have port 0.
  std::map<const Node*, unsigned char> ports;
  unsigned char port(const Node* from) const { return ports.count(from) ? ports.at(from) : 0; }
};

struct Exec;

// A graph definition.
struct Graph {
  Graph();
  ~Graph();
  void* handle = nullptr;
  std::vector<std::shared_ptr<Node>> nodes;
  std::shared_ptr<References> references = std::make_shared<References>();
  // If this graph is a conditional body: the graph that contains the conditional node.
  Graph* body_of = nullptr;
  // Whether the graph was moved into a parent graph, which owns it (INVARIANTS.md G7).
  bool moved = false;
  // The conditional handles that were created for this graph.
  std::vector<std::shared_ptr<Condition>> conditions;
  // Number of active stream captures that add nodes to this graph.
  std::atomic<int> captures{0};
  // If the graph has memory nodes: its executable graph. The instantiation of a second one is
  // refused while this one exists (INVARIANTS.md M9).
  std::weak_ptr<Exec> instance;
};

// One node of an executable graph. Child graphs are replaced by their nodes. The dependencies of a
// node are indices of earlier nodes (INVARIANTS.md G4).
struct FlatNode {
  CUgraphNodeType type;
  Work work;
  bool enabled = true;
  // Handle of the node in the definition, by which callers address this node.
  void* source = nullptr;
  std::vector<unsigned> dependencies;
  // For each dependency, the port of the source node; 0 for a full dependency (INVARIANTS.md G9).
  std::vector<unsigned char> ports{};
  // The next three members are used by conditional nodes only.
  std::shared_ptr<Condition> condition{};
  int condition_type = 0;
  std::vector<std::vector<FlatNode>> bodies{};
};

// An executable graph.
struct Exec {
  Exec();
  ~Exec();
  void* handle = nullptr;
  uint64_t flags = 0;
  std::vector<FlatNode> flat;
  std::shared_ptr<Program> program;
  std::shared_ptr<References> references;
  // The last launch. The next launch depends on it. Guarded by the scheduler's mutex.
  OpRef last;
};

// Guards graph definitions and executable graphs. The driver's documentation requires callers to
// serialize their accesses to a graph. The mutex prevents a crash if they do not.
inline std::mutex& graph_mutex = *new std::mutex;
inline Handles<Graph>& graphs =
    *new Handles<Graph>(0x55000000000000, "the graph handle is unknown or was destroyed");
inline Handles<Node>& graph_nodes =
    *new Handles<Node>(0x56000000000000, "the graph node handle is unknown or was destroyed");
inline Handles<Exec>& graph_execs =
    *new Handles<Exec>(0x57000000000000, "the executable graph handle is unknown or was destroyed");

// Adds a node of any type except child graph nodes and conditional nodes.
void add_params(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                const CUgraphNodeParams& params);
// Add a node that allocates or frees memory. `params` receives the address of the memory.
void add_alloc_node(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                    CUDA_MEM_ALLOC_NODE_PARAMS* params);
void add_free_node(CUgraphNode* out, CUgraph graph, const CUgraphNode* deps, size_t n,
                   CUdeviceptr p);
// Whether the graph or a child graph has nodes that allocate or free memory.
bool has_memory_node(const Graph& graph);
// Refuses the call with the error text `text` if has_memory_node(graph) (INVARIANTS.md M9).
void require_no_memory_node(const Graph& graph, const char* text);
CUgraphNodeType type_of(WorkKind kind);
const char* type_name(CUgraphNodeType type);
// Refuses the call if a stream is capturing into the graph.
void require_not_capturing(const Graph& graph);
// Refuses the call if the graph is a conditional body, or a child graph that was moved into its
// parent graph (INVARIANTS.md G7).
void require_standalone(const Graph& graph);
std::shared_ptr<Graph> clone_graph(const Graph& graph);
// Replaces the child graph of a child graph node with a clone of `child`.
void replace_child(Node& node, CUgraph child);
// Returns a definition with the nodes of an executable graph and their current parameters. Disabled
// nodes become empty nodes. When a launch of the executable graph is captured on a stream, this
// definition becomes the child graph of the captured node.
std::shared_ptr<Graph> graph_of(const Exec& exec);
// Removes the handles of a definition and of its child graphs. Returns null for an unknown handle.
std::shared_ptr<Graph> remove_graph(CUgraph handle);
// Adds `node`, whose type and work the caller has set, to a graph. If the call fails, the graph is
// unchanged.
void add_node(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t n,
              std::shared_ptr<Node> node);
// Creates the program that runs the nodes `flat`. If `top` is null, they are the nodes of an
// executable graph. Otherwise they are the nodes of a conditional body, and `top` is the program of
// the executable graph that contains it.
std::shared_ptr<Program> make_program(const std::vector<FlatNode>& flat,
                                      const std::shared_ptr<References>& references,
                                      Program* top = nullptr);

}  // namespace softcuda
