// PTX modules. The soft device recognizes PTX texts and passes them to the PTX library
// (../ptx/interface.h), which runs their kernels. The first PTX text loads the library.
#pragma once

#include <string>
#include <vector>

#include "modules.h"
#include "ptx/interface.h"

namespace softcuda {
namespace ptx {

// Whether a module image is PTX text: after white space and comments it begins with ".version".
bool is_ptx(const void* image);
// pack_texts() returns an image that contains several PTX texts. unpack_texts() returns the texts
// of such an image; if the image is a single PTX text, it returns this text.
std::string pack_texts(const std::vector<std::string>& texts);
std::vector<std::string> unpack_texts(const char* image);

// Parses PTX texts, links them and adds their kernels to `module`. Refuses the call with
// CUDA_ERROR_INVALID_PTX, with CUDA_ERROR_NOT_SUPPORTED if an instruction is valid but not
// supported, or with CUDA_ERROR_JIT_COMPILER_NOT_FOUND if the library cannot be loaded. `log`
// receives the error text.
void load(const std::vector<std::string>& texts, Module* module, std::string* log);
// Refuses the call with the same errors as load() if a text does not have the syntax of PTX.
void check_syntax(const std::string& text, std::string* log);

// The words of global memory that a kernel has read and written.
struct AccessLog {
  explicit AccessLog(const softcuda_ptx_kernel* kernel);
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;
  softcuda_ptx_log* const log;
  // Whether the host has seen that the kernel is complete. All later launches then see its writes,
  // so their accesses need no check against this log.
  std::atomic<bool> known{false};
};
// Returns an empty log for the accesses of a kernel that is launched on a stream; null if no
// accesses are checked or the kernel was not loaded from PTX.
std::shared_ptr<AccessLog> make_access_log(const KernelWork& work);

// State of the running launch of a kernel whose accesses are checked.
struct Launch {
  softcuda_ptx_launch* state = nullptr;
  // The accesses of this launch; null if no kernel can follow over a programmatic edge.
  std::shared_ptr<AccessLog> log;
  // The accesses of the kernels that precede this one over programmatic edges.
  std::vector<std::shared_ptr<const AccessLog>> preceding;
};
// begin_launch() prepares the state of a launch before a worker runs its first block, and
// end_launch() releases it after the last block. Both do nothing if no accesses are checked.
void begin_launch(Op& op);
void end_launch(Op& op);
// Runs blocks of a kernel on a worker. Returns false after a fault.
bool run_blocks(const Op& op, unsigned worker, uint64_t first, uint64_t last);
// Releases the mutexes that the calling thread has locked in run_blocks(). Called if a signal ended
// run_blocks().
void recover();

}  // namespace ptx
}  // namespace softcuda
