// Interface of the PTX front end to the rest of the soft device.
#pragma once

#include "src/modules.h"

namespace softcuda {
namespace ptx {

struct Kernel;
struct LaunchState;
class AccessLog;

// Whether a module image is PTX text: after white space and comments it begins with ".version".
bool is_ptx(const void* image);
// Returns an image that contains several PTX texts, and the texts of such an image or of an image
// that is one text.
std::string pack_texts(const std::vector<std::string>& texts);
std::vector<std::string> unpack_texts(const char* image);
// Parses PTX texts, links them and adds their kernels to `module`. Refuses the call with
// CUDA_ERROR_INVALID_PTX, or with CUDA_ERROR_UNSUPPORTED_PTX_VERSION if an instruction is valid but
// not supported. `log` receives the same text.
void load(const std::vector<std::string>& texts, Module* module, std::string* log);
// Whether a text has the syntax of PTX. `log` receives the error.
bool check_syntax(const std::string& text, std::string* log);
// Runs blocks of an interpreted kernel on a worker. Returns false after a fault.
bool run_blocks(const KernelWork& work, LaunchState* launch, unsigned worker, uint64_t first,
                uint64_t last, std::atomic<const char*>* running);
// Releases the mutexes that the calling thread has locked while it wrote buffered stores to memory.
// Called after a fault in run_blocks().
void unlock_stores();
// Prepares the state of a launch that its workers share, before any of them runs a block, and
// releases what is not needed after the last one has left.
void begin_launch(Op& op);
void end_launch(Op& op);
// Returns an empty log for the writes of a kernel that is launched on a stream; null if no accesses
// are checked or the kernel was not loaded from PTX. A log is known if the host knows that the
// kernel is complete, so that all later launches see its writes.
std::shared_ptr<AccessLog> make_access_log(const KernelWork& work);
void set_known(AccessLog& log);
bool is_known(const AccessLog& log);

}  // namespace ptx
}  // namespace softcuda
