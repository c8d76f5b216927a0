// CUDA arrays: memory for one-, two- and three-dimensional data that only copies access.
#pragma once

#include <string>

#include "scheduler.h"

namespace softcuda {

// One array. Its elements are stored row by row and slice by slice without gaps.
struct Array {
  void* handle = nullptr;
  CUDA_ARRAY3D_DESCRIPTOR descriptor{};
  std::shared_ptr<Allocation> memory;
  CopyShape shape;
};

// Resolves the address at which a copy begins in an array, and checks that the copy is inside of
// the array. `end` is the source or the destination of the copy; `side` receives the result.
// Returns an error text, or "" on success.
std::string resolve_array(const CopyEnd& end, const CopyShape& shape, CopySide* side);

}  // namespace softcuda
