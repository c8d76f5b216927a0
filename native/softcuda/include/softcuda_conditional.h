// The condition of an IF or WHILE node, which kernels set. A conditional handle is the address of
// such a cell. Cells are never freed, so that a stale handle is harmless.
#pragma once

// In a kernel source the shim has already declared this.
#if !defined(__SOFTCUDA__) || defined(SOFTCUDA_SHIM)
struct softcuda_condition {
  unsigned magic;
  unsigned value;
};
#define SOFTCUDA_CONDITION_MAGIC 0x50c0d17eu

#ifdef __SOFTCUDA__
typedef unsigned long long cudaGraphConditionalHandle;
static inline void cudaGraphSetConditional(unsigned long long handle, unsigned int value) {
  softcuda_condition* cell = reinterpret_cast<softcuda_condition*>(handle);
  if (cell == nullptr || cell->magic != SOFTCUDA_CONDITION_MAGIC) {
    softcuda_hook->trap(&softcuda_self, 719,
                        "cudaGraphSetConditional: the value is not a conditional handle");
    return;
  }
  __atomic_store_n(&cell->value, value, __ATOMIC_RELEASE);
}
#endif
#endif
