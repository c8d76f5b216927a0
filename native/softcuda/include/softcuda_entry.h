// Kernel entries, which describe the kernels of an image. compile.py appends SOFTCUDA_ENTRY(name,
// bounds) for each extern "C" __global__ function. The type of the function determines the sizes
// and offsets of its parameters and which of them are pointers.
#pragma once

template <class T>
struct softcuda_is_pointer {
  static constexpr unsigned char value = 0;
};
template <class T>
struct softcuda_is_pointer<T*> {
  static constexpr unsigned char value = 1;
};
template <class T>
struct softcuda_is_pointer<T* const> {
  static constexpr unsigned char value = 1;
};

template <unsigned... I>
struct softcuda_indices {};
template <unsigned N, unsigned... I>
struct softcuda_make_indices : softcuda_make_indices<N - 1, N - 1, I...> {};
template <unsigned... I>
struct softcuda_make_indices<0, I...> {
  typedef softcuda_indices<I...> type;
};

template <auto* Kernel, class Type>
struct softcuda_kernel;

template <auto* Kernel, class... A>
struct softcuda_kernel<Kernel, void(A...)> {
  static constexpr unsigned count = sizeof...(A);
  struct layout {
    unsigned sizes[count + 1];
    unsigned offsets[count + 1];
  };
  static constexpr layout make_layout() {
    layout out{};
    const unsigned sizes[] = {static_cast<unsigned>(sizeof(A))..., 0};
    const unsigned aligns[] = {static_cast<unsigned>(alignof(A))..., 1};
    unsigned offset = 0;
    for (unsigned i = 0; i < count; ++i) {
      offset = (offset + aligns[i] - 1) / aligns[i] * aligns[i];
      out.sizes[i] = sizes[i];
      out.offsets[i] = offset;
      offset += sizes[i];
    }
    return out;
  }
  static constexpr layout table = make_layout();
  static constexpr unsigned char pointers[count + 1] = {softcuda_is_pointer<A>::value..., 0};

  template <unsigned... I>
  static inline __attribute__((always_inline)) void call(void** params, softcuda_indices<I...>) {
    Kernel(*static_cast<A*>(params[I])...);
  }

  // Runs the threads of a block one after another on the current stack. A thread that waits keeps
  // the stack; the device then calls run() on another stack for the threads that have not started
  // (INVARIANTS.md X1).
  static void run(softcuda_block* block, void** params) {
    while (block->next < block->count) {
      block->current = block->next++;
      block->thread_idx = block->next_idx;
      if (++block->next_idx.x == block->block_dim.x) {
        block->next_idx.x = 0;
        if (++block->next_idx.y == block->block_dim.y) {
          block->next_idx.y = 0;
          ++block->next_idx.z;
        }
      }
      call(params, typename softcuda_make_indices<count>::type());
      ++block->exited;
      if (block->tracked != 0) softcuda_hook->thread_exit(block);
    }
  }
};

#define SOFTCUDA_ENTRY(function, bounds)                             \
  static const softcuda_entry softcuda_entry_##function = {          \
      #function,                                                     \
      softcuda_kernel<&function, decltype(function)>::run,           \
      softcuda_kernel<&function, decltype(function)>::count,         \
      bounds,                                                        \
      softcuda_kernel<&function, decltype(function)>::table.sizes,   \
      softcuda_kernel<&function, decltype(function)>::table.offsets, \
      softcuda_kernel<&function, decltype(function)>::pointers,      \
  };

#ifndef SOFTCUDA_ALIGNMENT
#define SOFTCUDA_ALIGNMENT 0
#endif
#define SOFTCUDA_IMAGE(...)                                                                   \
  static const softcuda_entry* const softcuda_entries[] = {__VA_ARGS__};                      \
  extern "C" __attribute__((visibility("default"))) const softcuda_image softcuda_image_v = { \
      SOFTCUDA_ABI,     sizeof(softcuda_entries) / sizeof(softcuda_entries[0]),               \
      softcuda_entries, &softcuda_self,                                                       \
      &softcuda_hook,   SOFTCUDA_ALIGNMENT};
