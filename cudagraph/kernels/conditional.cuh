// Declares cudaGraphSetConditional(handle, value), which sets the condition of an IF or WHILE node.
// The handle is that of graft.cudagraph.condition(), passed as an unsigned long long argument.
//
// On CUDA the function belongs to the device runtime, which the driver links when the module is
// loaded. Source without CUDA headers only needs the declaration.
#pragma once

#ifndef __SOFTCUDA__
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif
