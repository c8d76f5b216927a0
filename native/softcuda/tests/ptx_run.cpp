// Loads PTX modules and runs their kernel `k`, each in a child process.
//
//   ptx_run FILE SECONDS
//
// FILE contains the PTX texts of the modules, separated by zero bytes. Each module is loaded, and k
// is launched with two blocks of 64 threads and pointers to 4096 bytes as parameters. A line per
// module shows the error code and the text of the fault. If a child process ends abnormally, for
// example because a sanitizer found an error or SECONDS have passed, the program prints the number
// of the module and exits with status 1.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "driver_calls.h"

namespace stress {
namespace {

constexpr unsigned kParameters = 8;
constexpr size_t kBytes = 4096;

// Prints the outcome of one module. Returns the exit status.
int run_module(const char* text) {
  CUcontext context = nullptr;
  CALL(cuInit(0));
  CALL(cuDevicePrimaryCtxRetain(&context, 0));
  CALL(cuCtxSetCurrent(context));
  char reason[512] = "";
  CUmodule module = nullptr;
  CUresult result = cuModuleLoadData(&module, text);
  if (result != CUDA_SUCCESS) {
    softcuda_last_refusal(reason, sizeof reason);
    std::printf("refused %d %s\n", result, reason);
    return 0;
  }
  CUfunction function = nullptr;
  if (cuModuleGetFunction(&function, module, "k") != CUDA_SUCCESS) {
    std::printf("no kernel\n");
    return 0;
  }
  CUdeviceptr pointers[kParameters];
  void* parameters[kParameters];
  for (unsigned i = 0; i < kParameters; ++i) {
    void* memory = nullptr;
    CALL(cuMemHostAlloc(&memory, kBytes, CU_MEMHOSTALLOC_DEVICEMAP));
    CALL(cuMemHostGetDevicePointer_v2(&pointers[i], memory, 0));
    for (size_t k = 0; k < kBytes / 4; ++k) static_cast<unsigned*>(memory)[k] = k * (i + 1);
    parameters[i] = &pointers[i];
  }
  result = cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 1024, nullptr, parameters, nullptr);
  if (result == CUDA_SUCCESS) result = cuCtxSynchronize();
  softcuda_last_fault(reason, sizeof reason);
  std::printf("%s %d %s\n", result == CUDA_SUCCESS ? "ran" : "fault", result, reason);
  return 0;
}

// Runs one module in a child process. Returns whether the process ended normally.
bool run_in_child(const char* text, unsigned seconds) {
  std::fflush(stdout);
  const pid_t child = fork();
  WANT(child >= 0);
  if (child == 0) {
    alarm(seconds);
    const int status = run_module(text);
    std::fflush(stdout);
    // Threads of the device still run and use static objects, which must not be destroyed.
    _exit(status);
  }
  int status = 0;
  WANT(waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
  std::printf("the process ended with status %x\n", static_cast<unsigned>(status));
  return false;
}

int run(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: ptx_run FILE SECONDS\n");
    return 2;
  }
  std::ifstream file(arguments[1], std::ios::binary);
  const std::string modules{std::istreambuf_iterator<char>(file), {}};
  WANT(!modules.empty());
  unsigned failures = 0;
  unsigned number = 0;
  for (const char* text = modules.c_str(); text < modules.c_str() + modules.size();
       text += std::strlen(text) + 1) {
    std::printf("%u ", number++);
    if (!run_in_child(text, static_cast<unsigned>(std::atoi(arguments[2])))) ++failures;
  }
  return failures != 0;
}

}  // namespace
}  // namespace stress

int main(int count, char** arguments) { return stress::run(count, arguments); }
