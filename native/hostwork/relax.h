// A short pause inside a spinning loop.
#pragma once

namespace graft::hostwork {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

}  // namespace graft::hostwork
