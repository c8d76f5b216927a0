// The condition of a conditional node. Kernels set it through a conditional handle, which is the
// address of this structure. The structures are never freed, so that a stale handle does no harm.
#pragma once

// The shim (softcuda_shim.h) includes this file, and so may a kernel source. compile.py
// preprocesses the source without the shim, and then compiles the preprocessed text together with
// the shim. So that this text does not define the structure a second time, the file is empty during
// preprocessing.
#if !defined(__SOFTCUDA__) || defined(SOFTCUDA_SHIM)
struct softcuda_condition {
  unsigned magic;  // SOFTCUDA_CONDITION_MAGIC, by which an invalid handle is recognized
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
