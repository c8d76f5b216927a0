// Launches of kernels and host functions: checks of the launch configuration and translation of
// kernel parameters (INVARIANTS.md K5, K6).
#include <cstring>

#include "capture.h"
#include "modules.h"

namespace softcuda {
namespace {

// Rejects the launch. The error text is the kernel's name followed by `reason`.
[[noreturn]] void refuse_launch(const Function& f, const std::string& reason) {
  refuse(CUDA_ERROR_INVALID_VALUE, "kernel '" + f.name + "'" + reason);
}

// Checks the sizes of the grid, the blocks and the dynamic shared memory.
void check_geometry(const Function& f, softcuda_dim3 grid, softcuda_dim3 block,
                    unsigned shared_bytes) {
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) {
    refuse_launch(f, ": a grid or block dimension is 0");
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    refuse_launch(f, ": the grid exceeds 2147483647 x 65535 x 65535");
  }
  if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024) {
    refuse_launch(f, ": a block of " + std::to_string(block.x) + " x " + std::to_string(block.y) +
                         " x " + std::to_string(block.z) +
                         " threads exceeds 1024 x 1024 x 64 or 1024 threads");
  }
  const unsigned bound = f.entry().max_threads;
  if (bound != 0 && threads > bound) {
    refuse_launch(f, ": " + std::to_string(threads) +
                         " threads per block exceed its __launch_bounds__(" +
                         std::to_string(bound) + ")");
  }
  const int limit = f.max_dynamic_shared.load();
  if (shared_bytes > static_cast<unsigned>(limit)) {
    refuse_launch(f, ": " + std::to_string(shared_bytes) +
                         " bytes of dynamic shared memory exceed " + std::to_string(limit) +
                         " (cuFuncSetAttribute raises the limit)");
  }
}

// Copies the parameters into one buffer with the layout of the kernel's parameter list.
std::vector<char> gather(const Function& f, void* const* params, void* const* extra) {
  const softcuda_entry& entry = f.entry();
  const unsigned n = entry.nparams;
  std::vector<char> bytes(n == 0 ? 0 : entry.offsets[n - 1] + entry.sizes[n - 1]);
  if (n == 0) return bytes;
  if (params == nullptr || extra != nullptr) {
    refuse_launch(f, ": parameters must be passed in kernelParams; extra is not supported");
  }
  for (unsigned i = 0; i < n; ++i) {
    if (params[i] == nullptr) {
      refuse_launch(f, ": kernelParams[" + std::to_string(i) + "] is null");
    }
    std::memcpy(bytes.data() + entry.offsets[i], params[i], entry.sizes[i]);
  }
  return bytes;
}

}  // namespace

std::shared_ptr<const KernelWork> make_kernel(const CUDA_KERNEL_NODE_PARAMS& p) {
  auto work = std::make_shared<KernelWork>();
  // The caller sets either `func`, a CUfunction, or `kern`, a CUkernel. Both are the same handle on
  // this device (functions.cpp).
  work->function = functions.find(p.func != nullptr ? static_cast<void*>(p.func) : p.kern);
  const Function& function = *work->function;
  const softcuda_entry& entry = function.entry();
  work->params = p;
  work->params.func = static_cast<CUfunction>(function.handle);
  work->params.kern = nullptr;
  work->params.extra = nullptr;
  work->params.ctx = primary_context();
  work->grid = {p.gridDimX, p.gridDimY, p.gridDimZ};
  work->block = {p.blockDimX, p.blockDimY, p.blockDimZ};
  work->shared_bytes = p.sharedMemBytes;
  check_geometry(function, work->grid, work->block, p.sharedMemBytes);
  work->original = gather(function, p.kernelParams, p.extra);
  work->translated = work->original;
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
      refuse_launch(function, " parameter " + std::to_string(i) + ": " + why);
    }
    std::memcpy(at, &target.address, sizeof target.address);
    work->pointers.emplace_back(i, std::move(target.owner));
  }
  return work;
}

// Launches a kernel. `event` is null or an event that is recorded with the launch.
static void launch(const CUDA_KERNEL_NODE_PARAMS& p, CUstream handle, bool programmatic = false,
                   CUevent event = nullptr) {
  const auto stream = find_stream(handle);
  restore_fault_handlers();
  const auto recorded = event != nullptr ? events.find(event) : nullptr;
  Work work(make_kernel(p));
  work.programmatic = programmatic;
  if (capture_work(handle, work)) {
    if (recorded) capture_record(handle, event);
    return;
  }
  if (!work.kernel->function->loaded.exchange(true)) {
    may_wait_for_device("the first launch of a kernel loads it, which may synchronize the context");
    if ((settings().lock_model & 4) != 0) {
      wait_idle("first launch of a kernel: loading synchronizes the context (lock model 4)");
    }
  }
  const OpRef op = enqueue(*stream, std::move(work));
  if (recorded) store(recorded->op, op);
  finish_launch(op);
}

}  // namespace softcuda

using namespace softcuda;

SC_API(cuLaunchKernel, 4000, kContext, CUfunction, f, unsigned, gx, unsigned, gy, unsigned, gz,
       unsigned, bx, unsigned, by, unsigned, bz, unsigned, shared, CUstream, stream, void**, params,
       void**, extra) {
  launch({f, gx, gy, gz, bx, by, bz, shared, params, extra, nullptr, nullptr}, stream);
}

// Value of CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT.
struct ProgrammaticEvent {
  CUevent event;
  int flags;
  int trigger_at_block_start;
};

// Accepts launch attributes that are hints, which cannot change results; clusters of one block; and
// the attributes of programmatic launches. Refuses all other attributes.
static void check_launch_attribute(const CUlaunchAttribute& attribute, bool* programmatic,
                                   CUevent* event) {
  const int id = attribute.id;
  unsigned size[3];
  std::memcpy(size, attribute.value, sizeof size);
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      require(size[0] == 1 && size[1] == 1 && size[2] == 1, CUDA_ERROR_NOT_SUPPORTED,
              "clusters of more than one block are not implemented");
      return;
    // The attributes allow, but do not require, that the launch starts before the preceding work is
    // complete. Here it starts afterwards.
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      *programmatic = size[0] != 0;
      return;
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT: {
      ProgrammaticEvent value;
      std::memcpy(&value, attribute.value, sizeof value);
      require((events.find(value.event)->flags & CU_EVENT_DISABLE_TIMING) != 0,
              CUDA_ERROR_INVALID_VALUE,
              "a programmatic event must be created with CU_EVENT_DISABLE_TIMING");
      require(value.flags == 0, CUDA_ERROR_INVALID_VALUE,
              "the flags of a programmatic event must be 0");
      *event = value.event;
      return;
    }
    case CU_LAUNCH_ATTRIBUTE_IGNORE:
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return;
    default:
      refuse(CUDA_ERROR_NOT_SUPPORTED,
             "launch attribute " + std::to_string(id) + " is not implemented");
  }
}

SC_API(cuLaunchKernelEx, 11060, kContext, const CUlaunchConfig*, c, CUfunction, f, void**, params,
       void**, extra) {
  require(c != nullptr);
  bool programmatic = false;
  CUevent event = nullptr;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    check_launch_attribute(c->attrs[i], &programmatic, &event);
  }
  launch({f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
          c->sharedMemBytes, params, extra, nullptr, nullptr},
         c->hStream, programmatic, event);
}

static void launch_host(CUstream handle, CUhostFn fn, void* data) {
  require(fn != nullptr);
  const auto stream = find_stream(handle);
  Work work(HostWork{fn, data});
  if (capture_work(handle, work)) return;
  if ((settings().lock_model & 2) != 0) {
    const OpRef host = load(stream->host);
    if (host) wait_op(host, "cuLaunchHostFunc: the host function in flight (lock model 2)");
  }
  store(stream->host, enqueue(*stream, std::move(work)));
}

SC_API(cuLaunchHostFunc, 10000, 0, CUstream, stream, CUhostFn, fn, void*, data) {
  launch_host(stream, fn, data);
}

SC_API(cuLaunchHostFunc_v2, 13020, 0, CUstream, stream, CUhostFn, fn, void*, data, unsigned, mode) {
  // The modes are BLOCKING and SPINWAIT. They make no difference here, because one thread runs all
  // host functions.
  require(mode <= 1);
  launch_host(stream, fn, data);
}
