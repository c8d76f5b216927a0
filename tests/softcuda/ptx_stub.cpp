// A stand-in for the PTX library, with which the tests check the other side of its interface.
//
// Each text that it loads has the kernel `k`, whose parameter is a pointer: each block adds 1 to
// the word there. A text with the word "wrong" is refused.
#include <cstring>

#include "ptx/interface.h"

#ifndef STUB_ABI
#define STUB_ABI SOFTCUDA_PTX_ABI
#endif

namespace {

const softcuda_ptx_device* g_device = nullptr;

const unsigned kSizes[] = {8}, kOffsets[] = {0};
const unsigned char kIsPointer[] = {0};
const softcuda_ptx_kernel kKernel = {{"k", nullptr, 1, 0, kSizes, kOffsets, kIsPointer}, 100, 0};
const softcuda_ptx_kernel* const kKernels[] = {&kKernel};
const softcuda_ptx_module kGood = {0, "", 1, kKernels, 0, nullptr};
const softcuda_ptx_module kEmpty = {0, "", 0, nullptr, 0, nullptr};
const softcuda_ptx_module kWrong = {
    CUDA_ERROR_INVALID_PTX, "the text is wrong", 0, nullptr, 0, nullptr};

bool is_wrong(const char* text) { return std::strstr(text, "wrong") != nullptr; }

void open(const softcuda_ptx_device* device) { g_device = device; }

const softcuda_ptx_module* load(const char* const* texts, const size_t*, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    if (is_wrong(texts[i])) return &kWrong;
  }
  return &kGood;
}

const softcuda_ptx_module* check_syntax(const char* text, size_t) {
  return is_wrong(text) ? &kWrong : &kEmpty;
}

void free_module(const softcuda_ptx_module*) {}
int checks_accesses() { return 0; }
softcuda_ptx_log* make_log(const softcuda_ptx_kernel*) { return nullptr; }
void free_log(softcuda_ptx_log*) {}
softcuda_ptx_launch* begin_launch(const softcuda_ptx_kernel*, softcuda_ptx_log*,
                                  softcuda_ptx_log* const*, unsigned) {
  return nullptr;
}
void end_launch(softcuda_ptx_launch*) {}

int run_blocks(const softcuda_ptx_work* work, softcuda_ptx_launch*, unsigned,
               unsigned long long first, unsigned long long last) {
  unsigned long long address = 0;
  std::memcpy(&address, work->parameters, sizeof address);
  softcuda_memory found{};
  if (g_device->find_memory(address, 4, &found) == 0) {
    char why[256];
    g_device->explain(address, 4, &found, why, sizeof why);
    g_device->fault(CUDA_ERROR_ILLEGAL_ADDRESS, why);
    return 0;
  }
  int* word = reinterpret_cast<int*>(found.storage + (address - found.address));
  __atomic_fetch_add(word, static_cast<int>(last - first), __ATOMIC_RELAXED);
  g_device->release(found.reference);
  return 1;
}

void recover() {}

}  // namespace

extern "C" __attribute__((visibility("default")))
const softcuda_ptx_library softcuda_ptx_library_v = {
    STUB_ABI, open,     load,         check_syntax, free_module, checks_accesses,
    make_log, free_log, begin_launch, end_launch,   run_blocks,  recover};
