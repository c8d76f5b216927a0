// Test of the soft device through the driver API, without graft.
//
//   driver_test       memory, streams, errors, and a graph with copies and a host node
//   driver_test ptx   also loads a PTX module and launches its kernel, alone and in a graph
//
// If a check fails, the program prints the failed expression and exits with status 1.
#include <cstring>
#include <vector>

#include "driver_calls.h"

namespace stress {
namespace {

constexpr unsigned kWords = 256;
constexpr size_t kBytes = kWords * sizeof(unsigned);

// A kernel that adds the parameter `number` to each word of an array.
constexpr char kAdd[] = R"(.version 8.0
.target sm_90
.address_size 64
.visible .entry add(.param .u64 array, .param .u32 number) {
  .reg .b32 %r<4>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [array];
  ld.param.u32 %r1, [number];
  mov.u32 %r2, %tid.x;
  mad.wide.u32 %rd2, %r2, 4, %rd1;
  ld.global.u32 %r3, [%rd2];
  add.u32 %r3, %r3, %r1;
  st.global.u32 [%rd2], %r3;
  ret;
}
)";

// Pinned memory that host and device use.
struct Pinned {
  Pinned() {
    void* memory = nullptr;
    CALL(cuMemHostAlloc(&memory, kBytes, CU_MEMHOSTALLOC_DEVICEMAP));
    words = static_cast<unsigned*>(memory);
    CALL(cuMemHostGetDevicePointer_v2(&address, memory, 0));
  }
  ~Pinned() { CALL(cuMemFreeHost(words)); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  unsigned* words = nullptr;
  CUdeviceptr address = 0;
};

void test_stream(CUstream stream) {
  Pinned from, to;
  for (unsigned i = 0; i < kWords; ++i) from.words[i] = i;
  CALL(cuMemsetD8Async(to.address, 0xff, kBytes, stream));
  CALL(cuMemcpyDtoDAsync_v2(to.address, from.address, kBytes / 2, stream));
  CALL(cuStreamSynchronize(stream));
  for (unsigned i = 0; i < kWords; ++i) WANT(to.words[i] == (i < kWords / 2 ? i : 0xffffffffu));
  WANT(cuMemsetD8Async(to.address, 0, kBytes + 1, stream) == CUDA_ERROR_INVALID_VALUE);
}

// Launches a graph in which a host node changes the output of a copy, and another copy reads it.
void test_graph(CUstream stream) {
  Pinned from, between, to;
  for (unsigned i = 0; i < kWords; ++i) from.words[i] = i;
  CUgraph graph = nullptr;
  CALL(cuStreamBeginCapture_v2(stream, 0));
  CALL(cuMemcpyDtoDAsync_v2(between.address, from.address, kBytes, stream));
  const CUhostFn square = [](void* words) {
    for (unsigned i = 0; i < kWords; ++i) {
      static_cast<unsigned*>(words)[i] *= static_cast<unsigned*>(words)[i];
    }
  };
  CALL(cuLaunchHostFunc(stream, square, between.words));
  CALL(cuMemcpyDtoDAsync_v2(to.address, between.address, kBytes, stream));
  CALL(cuStreamEndCapture(stream, &graph));
  CUgraphExec exec = nullptr;
  CALL(cuGraphInstantiateWithFlags(&exec, graph, 0));
  for (int launch = 0; launch < 3; ++launch) {
    std::memset(to.words, 0, kBytes);
    CALL(cuGraphLaunch(exec, stream));
    CALL(cuStreamSynchronize(stream));
    for (unsigned i = 0; i < kWords; ++i) WANT(to.words[i] == i * i);
  }
  CALL(cuGraphExecDestroy(exec));
  CALL(cuGraphDestroy(graph));
}

void test_ptx(CUstream stream) {
  CUmodule module = nullptr;
  CUfunction add = nullptr;
  CALL(cuModuleLoadData(&module, kAdd));
  CALL(cuModuleGetFunction(&add, module, "add"));
  Pinned array;
  std::memset(array.words, 0, kBytes);
  unsigned number = 5;
  void* parameters[] = {&array.address, &number};
  CUgraph graph = nullptr;
  CALL(cuStreamBeginCapture_v2(stream, 0));
  CALL(cuLaunchKernel(add, 1, 1, 1, kWords, 1, 1, 0, stream, parameters, nullptr));
  CALL(cuStreamEndCapture(stream, &graph));
  CUgraphExec exec = nullptr;
  CALL(cuGraphInstantiateWithFlags(&exec, graph, 0));
  number = 100;
  CALL(cuLaunchKernel(add, 1, 1, 1, kWords, 1, 1, 0, stream, parameters, nullptr));
  CALL(cuGraphLaunch(exec, stream));
  CALL(cuStreamSynchronize(stream));
  for (unsigned i = 0; i < kWords; ++i) WANT(array.words[i] == 105);
  CALL(cuGraphExecDestroy(exec));
  CALL(cuGraphDestroy(graph));
  CALL(cuModuleUnload(module));
}

// If the PTX library does not exist, loading PTX fails with an error text that names the library.
void test_ptx_without_library() {
  CUmodule module = nullptr;
  char reason[512] = "";
  WANT(cuModuleLoadData(&module, kAdd) == CUDA_ERROR_JIT_COMPILER_NOT_FOUND);
  softcuda_last_refusal(reason, sizeof reason);
  WANT(std::strstr(reason, "SOFTCUDA_PTX_LIBRARY") != nullptr);
}

int run(bool ptx) {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  WANT(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_ERROR_NOT_INITIALIZED);
  CALL(cuInit(0));
  CALL(cuDevicePrimaryCtxRetain(&context, 0));
  CALL(cuCtxSetCurrent(context));
  CALL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  test_stream(stream);
  test_graph(stream);
  if (ptx) {
    test_ptx(stream);
  } else {
    setenv("SOFTCUDA_PTX_LIBRARY", "/nonexistent", 1);
    test_ptx_without_library();
  }
  CALL(cuStreamDestroy_v2(stream));
  CALL(cuDevicePrimaryCtxRelease_v2(0));
  std::printf("passed\n");
  return 0;
}

}  // namespace
}  // namespace stress

int main(int count, char** arguments) {
  return stress::run(count > 1 && std::strcmp(arguments[1], "ptx") == 0);
}
