// The functions that implement the interface of the PTX library (interface.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "program.h"

namespace softcuda {
namespace ptx {

// A loaded module, or the error that made loading fail.
struct LoadedModule : softcuda_ptx_module {
  LoadedModule() : softcuda_ptx_module{} {}
  // Sets the pointers in the base class, which the soft device reads, to the contents of this
  // class.
  void publish();

  std::string error_text;
  std::vector<std::shared_ptr<Kernel>> owned_kernels;
  std::vector<const softcuda_ptx_kernel*> kernel_table;
  // Addresses and sizes of the variables, by name.
  std::map<std::string, std::pair<uint64_t, size_t>> addresses;
  std::vector<softcuda_ptx_variable> variable_table;
};

// Parses PTX texts, links them and adds their kernels and variables to `module`. The error is
// CUDA_ERROR_INVALID_PTX, or CUDA_ERROR_NOT_SUPPORTED if an instruction is valid but not supported.
void load(const std::vector<std::string>& texts, LoadedModule* module);
// Checks that a text has the syntax of PTX. `module` receives the error, if there is one.
void check_syntax(const std::string& text, LoadedModule* module);
// Runs blocks of a kernel on a worker. Returns false after a fault.
bool run_blocks(const softcuda_ptx_work& work, LaunchState* launch, unsigned worker, uint64_t first,
                uint64_t last);
// Releases the mutexes that the calling thread had locked when a signal ended run_blocks() while it
// wrote buffered stores to memory.
void unlock_stores();

}  // namespace ptx
}  // namespace softcuda
