// The table of functions that the library exports, and the functions of the device that it calls.
#include "library.h"

#include <cstdio>
#include <new>

#include "launch_state.h"
#include "races.h"
#include "stores.h"

namespace softcuda {
namespace ptx {

namespace {

const softcuda_ptx_device* g_device = nullptr;

void open(const softcuda_ptx_device* device) { g_device = device; }

// Returns a new module, which `body` fills. std::bad_alloc becomes the module's error, because no
// exception may cross the interface.
template <class Body>
const softcuda_ptx_module* make_module(const Body& body) {
  auto* module = new LoadedModule;
  try {
    body(module);
  } catch (const std::bad_alloc&) {
    *module = LoadedModule();
    module->error = CUDA_ERROR_OUT_OF_MEMORY;
  }
  module->publish();
  return module;
}

const softcuda_ptx_module* load_texts(const char* const* texts, const size_t* sizes,
                                      unsigned count) {
  return make_module([&](LoadedModule* module) {
    std::vector<std::string> copies;
    for (unsigned i = 0; i < count; ++i) copies.emplace_back(texts[i], sizes[i]);
    load(copies, module);
  });
}

const softcuda_ptx_module* check_text(const char* text, size_t size) {
  return make_module([&](LoadedModule* module) { check_syntax(std::string(text, size), module); });
}

void free_module(const softcuda_ptx_module* module) {
  delete static_cast<const LoadedModule*>(module);
}

// Whether the order of accesses is checked.
bool checks_order() { return options().adversarial || options().racecheck; }

int checks_accesses() { return checks_order() || !options().count_file.empty(); }

softcuda_ptx_log* make_log(const softcuda_ptx_kernel* kernel) {
  return new AccessLog(static_cast<const Kernel*>(kernel)->name);
}

void free_log(softcuda_ptx_log* log) { delete static_cast<AccessLog*>(log); }

softcuda_ptx_launch* begin_launch(const softcuda_ptx_kernel* kernel, softcuda_ptx_log* log,
                                  softcuda_ptx_log* const* preceding, unsigned count) {
  auto* launch = new LaunchState;
  if (!options().count_file.empty()) {
    launch->counts = std::make_unique<LaunchCounts>(*static_cast<const Kernel*>(kernel));
  }
  if (!checks_order()) return launch;
  if (options().racecheck) {
    launch->races = std::make_unique<GlobalRaces>(*static_cast<const Kernel*>(kernel));
  }
  if (options().adversarial) launch->pending = std::make_unique<PendingStores>();
  launch->log = static_cast<AccessLog*>(log);
  for (unsigned i = 0; i < count; ++i) {
    launch->unordered.push_back(static_cast<const AccessLog*>(preceding[i]));
  }
  return launch;
}

void end_launch(softcuda_ptx_launch* launch) {
  auto* state = static_cast<LaunchState*>(launch);
  end_launch_stores(*state);
  if (state->counts != nullptr) state->counts->write(options().count_file);
  delete state;
}

int run(const softcuda_ptx_work* work, softcuda_ptx_launch* launch, unsigned worker,
        unsigned long long first, unsigned long long last) {
  static LaunchState& unchecked = *new LaunchState;
  LaunchState* state = launch != nullptr ? static_cast<LaunchState*>(launch) : &unchecked;
  return run_blocks(*work, state, worker, first, last) ? 1 : 0;
}

void recover() {
  unlock_stores();
  abandon_counts();
}

}  // namespace

const softcuda_ptx_device& device() { return *g_device; }

std::string hex(unsigned long long value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

void LoadedModule::publish() {
  text = error_text.c_str();
  for (const auto& kernel : owned_kernels) kernel_table.push_back(kernel.get());
  for (const auto& item : addresses) {
    variable_table.push_back({item.first.c_str(), item.second.first, item.second.second});
  }
  kernel_count = static_cast<unsigned>(kernel_table.size());
  kernels = kernel_table.data();
  variable_count = static_cast<unsigned>(variable_table.size());
  variables = variable_table.data();
}

}  // namespace ptx
}  // namespace softcuda

using namespace softcuda::ptx;

extern "C" __attribute__((visibility("default")))
const softcuda_ptx_library softcuda_ptx_library_v = {
    SOFTCUDA_PTX_ABI, open,     load_texts,   check_text, free_module, checks_accesses,
    make_log,         free_log, begin_launch, end_launch, run,         recover};
