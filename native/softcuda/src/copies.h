// Building copy and fill work from driver parameters; shared by the stream calls and graph nodes.
#pragma once

#include "scheduler.h"

namespace softcuda {

CUresult make_copy(const CUDA_MEMCPY3D& params, CopyWork* out);
CUresult make_fill(const CUDA_MEMSET_NODE_PARAMS& params, FillWork* out);

}  // namespace softcuda
