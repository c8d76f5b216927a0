// Kernel launches: geometry checks and parameter translation (invariants K5, K6).
#include <algorithm>
#include <cstring>

#include "capture.h"
#include "modules.h"

namespace softcuda {
namespace {

constexpr size_t kExtraPointer = 1, kExtraSize = 2;  // CU_LAUNCH_PARAM_BUFFER_*

CUresult check_geometry(const Function& f, softcuda_dim3 grid, softcuda_dim3 block,
                        unsigned shared_bytes) {
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  const std::string who = "kernel '" + f.name + "': ";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE, who + "a grid or block dimension is 0");
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return refuse(CUDA_ERROR_INVALID_VALUE, who + "the grid exceeds 2147483647 x 65535 x 65535");
  }
  if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  who + std::to_string(threads) + " threads a block exceed 1024");
  }
  const unsigned bound = f.entry().max_threads;
  if (bound != 0 && threads > bound) {
    return refuse(CUDA_ERROR_INVALID_VALUE, who + std::to_string(threads) +
                                                " threads a block exceed its __launch_bounds__(" +
                                                std::to_string(bound) + ")");
  }
  const int limit = f.max_dynamic_shared.load();
  if (shared_bytes > static_cast<unsigned>(limit)) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  who + std::to_string(shared_bytes) + " bytes of dynamic shared memory exceed " +
                      std::to_string(limit) + " (cuFuncSetAttribute raises the limit)");
  }
  return CUDA_SUCCESS;
}

// One of kernelParams and extra gives the values; both or neither is an error.
CUresult gather(const softcuda_entry& entry, void* const* params, void* const* extra,
                std::vector<char>* bytes) {
  const unsigned n = entry.nparams;
  const size_t total = n == 0 ? 0 : entry.offsets[n - 1] + entry.sizes[n - 1];
  bytes->resize(total);
  if (n == 0) return CUDA_SUCCESS;
  const std::string who = std::string("kernel '") + entry.name + "': ";
  if ((params == nullptr) == (extra == nullptr)) {
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  who + "exactly one of kernelParams and extra must be given");
  }
  if (params != nullptr) {
    for (unsigned i = 0; i < n; ++i) {
      if (params[i] == nullptr) {
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      who + "kernelParams[" + std::to_string(i) + "] is null");
      }
      std::memcpy(bytes->data() + entry.offsets[i], params[i], entry.sizes[i]);
    }
    return CUDA_SUCCESS;
  }
  const void* buffer = nullptr;
  const size_t* size = nullptr;
  for (; *extra != nullptr; extra += 2) {
    const auto key = reinterpret_cast<size_t>(extra[0]);
    if (key == kExtraPointer) buffer = extra[1];
    if (key == kExtraSize) size = static_cast<const size_t*>(extra[1]);
  }
  if (buffer == nullptr || size == nullptr || *size < total) {
    return refuse(CUDA_ERROR_INVALID_VALUE, who + "the parameter buffer is missing or too small");
  }
  std::memcpy(bytes->data(), buffer, total);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult make_kernel(const std::shared_ptr<Function>& function, softcuda_dim3 grid,
                     softcuda_dim3 block, unsigned shared_bytes, void* const* params,
                     void* const* extra, std::shared_ptr<const KernelWork>* out) {
  if (!function) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a kernel of a loaded module");
  const softcuda_entry& entry = function->entry();
  if (CUresult r = check_geometry(*function, grid, block, shared_bytes); r != CUDA_SUCCESS)
    return r;
  auto work = std::make_shared<KernelWork>();
  work->function = function;
  work->grid = grid;
  work->block = block;
  work->shared_bytes = shared_bytes;
  if (CUresult r = gather(entry, params, extra, &work->given); r != CUDA_SUCCESS) return r;
  work->translated = work->given;
  work->arguments.resize(entry.nparams);
  for (unsigned i = 0; i < entry.nparams; ++i) {
    char* at = work->translated.data() + entry.offsets[i];
    work->arguments[i] = at;
    if (entry.is_pointer[i] == 0) continue;
    unsigned long long value = 0;
    std::memcpy(&value, at, sizeof value);
    if (value == 0) continue;
    Target target;
    std::string why;
    if (!resolve_for_device(value, 0, &target, &why)) {
      return refuse(CUDA_ERROR_INVALID_VALUE,
                    "kernel '" + function->name + "' parameter " + std::to_string(i) + ": " + why);
    }
    std::memcpy(at, &target.address, sizeof target.address);
    work->pointers.emplace_back(i, std::move(target.owner));
  }
  *out = std::move(work);
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction handle, softcuda_dim3 grid, softcuda_dim3 block,
                       unsigned shared_bytes, CUstream stream_handle, void** params, void** extra) {
  std::shared_ptr<Stream> stream = find_stream(stream_handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  keep_fault_handlers();
  std::shared_ptr<Function> function = find_function(handle);
  Work work;
  work.kind = WorkKind::kernel;
  if (CUresult r = make_kernel(function, grid, block, shared_bytes, params, extra, &work.kernel);
      r != CUDA_SUCCESS) {
    return r;
  }
  if (auto r = capture_work(stream_handle, CU_GRAPH_NODE_TYPE_KERNEL, work)) return *r;
  if (!function->loaded.exchange(true)) {
    may_wait_for_device("the first launch of a kernel loads it, which may synchronise the context");
    if ((settings().lock_model & 4) != 0) {
      wait_idle("first launch of a kernel: loading synchronises the context (lock model 4)");
    }
  }
  enqueue(*stream, std::move(work));
  return CUDA_SUCCESS;
}

}  // namespace softcuda

using namespace softcuda;

SC_EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                  unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                  void** params, void** extra) {
  SC_API(cuLaunchKernel, kContext);
  return launch(f, softcuda_dim3{gx, gy, gz}, softcuda_dim3{bx, by, bz}, shared, stream, params,
                extra);
}

SC_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** params,
                                    void** extra) {
  SC_API(cuLaunchKernelEx, kContext);
  if (c == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const int id = c->attrs[i].id;
    // IGNORE, ACCESS_POLICY_WINDOW, PRIORITY, MEM_SYNC_DOMAIN(_MAP), CARVEOUT: hints.
    if (id == 0 || id == 1 || id == 8 || id == 9 || id == 10 || id == 14) continue;
    return refuse(CUDA_ERROR_NOT_SUPPORTED,
                  "launch attribute " + std::to_string(id) + " is not implemented");
  }
  return launch(f, softcuda_dim3{c->gridDimX, c->gridDimY, c->gridDimZ},
                softcuda_dim3{c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes,
                c->hStream, params, extra);
}

static CUresult launch_host(CUstream stream_handle, CUhostFn fn, void* data) {
  if (fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream = find_stream(stream_handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  Work work;
  work.kind = WorkKind::host;
  work.host = HostWork{fn, data};
  if (auto r = capture_work(stream_handle, CU_GRAPH_NODE_TYPE_HOST, work)) return *r;
  if ((settings().lock_model & 2) != 0) {
    const OpRef host = last_host(*stream);
    if (host) wait_op(host, "cuLaunchHostFunc: the host function in flight (lock model 2)");
  }
  remember_host(*stream, enqueue(*stream, std::move(work)));
  return CUDA_SUCCESS;
}

SC_EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void* data) {
  SC_API(cuLaunchHostFunc, 0);
  return launch_host(stream, fn, data);
}

SC_EXPORT CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn fn, void* data, unsigned mode) {
  SC_API(cuLaunchHostFunc_v2, 0);
  if (mode > 1) return CUDA_ERROR_INVALID_VALUE;  // BLOCKING or SPINWAIT; one thread serves both
  return launch_host(stream, fn, data);
}
