// Declares cudaGraphSetConditional(handle, value), which sets the condition of an IF or WHILE node.
// `handle` is the Condition that graft.cudagraph.condition() returned. It is passed to the kernel
// as an unsigned long long argument.
//
// On CUDA the function belongs to the device runtime, which the driver links when it loads the
// module. The declaration replaces CUDA's header, which graft's kernels do not include.
#pragma once

#ifndef __SOFTCUDA__
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif
