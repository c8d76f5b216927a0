// Stress test of the soft device and of hostwork, built with sanitizers.
//
//   stress graphs IMAGE SEED GRAPHS THREADS   run random graphs and compare them with a model
//   stress plans IMAGE TIMES                  change a kernel node right after it has run
//   stress faults IMAGE                       run a kernel that writes out of bounds
//   stress broken                             run code with a data race and a use after free
//
// IMAGE is kernels.cu compiled by softcuda/compile.py. If a check fails, the program prints the
// failed expression and exits with status 1.
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include "graph_case.h"

namespace stress {
namespace {

CUcontext open_device() {
  CUcontext context = nullptr;
  CALL(cuInit(0));
  CALL(cuDevicePrimaryCtxRetain(&context, 0));
  CALL(cuCtxSetCurrent(context));
  Dl_info info{};
  WANT(dladdr(reinterpret_cast<void*>(&cuInit), &info) != 0);
  graft::hostwork::bind_driver(info.dli_fname, context);
  graft::hostwork::start_reaper();
  return context;
}

#ifdef SOFTCUDA_TSAN_FIBERS
// Functions by which mailbox kernels access their words. ThreadSanitizer does not instrument
// kernels but sees the accesses in these functions.
void store_word(int* word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
int load_word(const int* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
#endif

Kernels load(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> image{std::istreambuf_iterator<char>(file), {}};
  WANT(!image.empty());
  Kernels kernels;
  CALL(cuModuleLoadData(&kernels.module, image.data()));
  const auto find = [&](CUfunction* function, const char* name) {
    CALL(cuModuleGetFunction(function, kernels.module, name));
  };
  find(&kernels.plain, "plain_cell");
  find(&kernels.barrier, "barrier_cell");
  find(&kernels.warp, "warp_cell");
  find(&kernels.stray, "stray_cell");
  find(&kernels.decide, "decide_cell");
  find(&kernels.loop, "loop_cell");
#ifdef SOFTCUDA_TSAN_FIBERS
  kernels.store = reinterpret_cast<uint64_t>(&store_word);
  kernels.load = reinterpret_cast<uint64_t>(&load_word);
#endif
  find(&kernels.request, kernels.store != 0 ? "post_cell" : "mailbox_request");
  find(&kernels.wait, kernels.store != 0 ? "await_cell" : "mailbox_wait");
  return kernels;
}

int graphs(const char* image, unsigned seed, unsigned count, unsigned threads) {
  CUcontext context = open_device();
  Kernels kernels = load(image);
  graft::hostwork::WorkerOptions options;
  options.name = "stress";
  kernels.worker = std::make_shared<graft::hostwork::Worker>(options);
  std::vector<std::thread> running;
  for (unsigned t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      CALL(cuCtxSetCurrent(context));
      for (unsigned i = t; i < count; i += threads) {
        // The graph depends only on this seed. A failure can be reproduced by a run with the seed,
        // one graph and one thread.
        Random random(seed + i);
        GraphCase(random, kernels).run();
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  CALL(cuCtxSynchronize());
  WANT(graft::hostwork::flush(20.0));
  CALL(cuModuleUnload(kernels.module));
  // Wait until the records of all host steps are freed. The user objects that own them may be
  // destroyed late, on a driver thread.
  for (int i = 0; i < 2000 && graft::hostwork::live_records() != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  WANT(graft::hostwork::live_records() == 0);
  const auto released = graft::hostwork::released_records();
  for (const char* kind : {"graph", "graph_exec", "user_object", "stream", "event", "module",
                           "pinned_memory", "device_memory"}) {
    if (softcuda_live(kind) != 0) std::fprintf(stderr, "%s: %ld left\n", kind, softcuda_live(kind));
    WANT(softcuda_live(kind) == 0);
  }
  std::printf("%u graphs on %u threads; %ld records\n", count, threads, released);
  CALL(cuDevicePrimaryCtxRelease_v2(0));
  return 0;
}

// Changes a kernel node right after a worker thread of the soft device has run it. The change frees
// the node's plan, which holds its translated parameters. The test does not wait for the end of the
// launch. The worker's use of the plan and the free are therefore ordered only by the soft device's
// counter of launches in flight (invariant G8 of softcuda/INVARIANTS.md).
int plans(const char* image, int times) {
  open_device();
  const Kernels kernels = load(image);
  const GraphSpec spec{{NodeSpec{}}};
  Builder builder(kernels, spec, false);
  CUstream stream = nullptr;
  CALL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < times; ++i) {
    Definition made = builder.build();
    CUgraphExec exec = nullptr;
    CALL(cuGraphInstantiateWithFlags(&exec, made.graph, 0));
    const int64_t before = softcuda_count("node");
    CALL(cuGraphLaunch(exec, stream));
    while (softcuda_count("node") == before) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(i % 2 * 500));
    const auto launch = builder.cell_kernel(0, 1);
    CALL(cuGraphExecKernelNodeSetParams_v2(exec, made.nodes[0], &launch->params));
    made.drop();  // releases the last reference to the plan that was run
    CALL(cuGraphExecDestroy(exec));
  }
  CALL(cuStreamDestroy_v2(stream));
  std::printf("%d plans\n", times);
  return 0;
}

// Checks that the report of a fault names the kernel and that later calls return errors.
int faults(const char* image) {
  open_device();
  Kernels kernels = load(image);
  void* memory = nullptr;
  CUdeviceptr alias = 0;
  CALL(cuMemHostAlloc(&memory, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
  CALL(cuMemHostGetDevicePointer_v2(&alias, memory, 0));
  int out = 1 << 10;  // the first word after the 4096 bytes
  void* params[] = {&alias, &out};
  CALL(cuLaunchKernel(kernels.stray, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr));
  WANT(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
  char text[512] = "";
  softcuda_last_fault(text, sizeof text);
  WANT(std::strstr(text, "stray_cell") != nullptr);
  WANT(cuLaunchKernel(kernels.stray, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr) ==
       CUDA_ERROR_ILLEGAL_ADDRESS);
  CALL(cuDevicePrimaryCtxRelease_v2(0));
  std::printf("%s\n", text);
  return 0;
}

// Contains a data race and a use after free that the sanitizer must find. They occur in host
// functions, which run on a thread of the soft device.
int broken() {
  open_device();
  static int shared = 0;
  const auto touch = [](void*) { ++shared; };
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  CUstream stream = nullptr;
  CALL(cuGraphCreate(&graph, 0));
  for (CUhostFn step : {CUhostFn(touch), CUhostFn([](void* data) {
                          int* freed = new int(*static_cast<int*>(data));
                          delete freed;
                          shared += *freed;
                        })}) {
    CUgraphNode node = nullptr;
    const CUDA_HOST_NODE_PARAMS params{step, &shared};
    CALL(cuGraphAddHostNode(&node, graph, nullptr, 0, &params));
  }
  CALL(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CALL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CALL(cuGraphLaunch(exec, stream));
  for (int i = 0; i < 1000; ++i) touch(nullptr);
  CALL(cuStreamSynchronize(stream));
  std::printf("no error was found: %d\n", shared);
  return 0;
}

int usage() {
  std::fprintf(stderr, "usage: stress graphs|plans|faults|broken ...; see stress.cpp\n");
  return 2;
}

int run(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "graphs" && count == 6) {
    const auto number = [&](int i) { return static_cast<unsigned>(std::atoi(arguments[i])); };
    return graphs(arguments[2], number(3), number(4), number(5));
  }
  if (what == "plans" && count == 4) return plans(arguments[2], std::atoi(arguments[3]));
  if (what == "faults" && count == 3) return faults(arguments[2]);
  if (what == "broken") return broken();
  return usage();
}

}  // namespace
}  // namespace stress

int main(int count, char** arguments) { return stress::run(count, arguments); }
