// Setting the condition of an IF or WHILE node from a kernel: cudaGraphSetConditional(handle,
// value) with the handle that Graph.condition() gave, passed as an unsigned long long parameter.
//
// On CUDA the function is the device runtime's, which the driver provides when the module is
// loaded; declaring it is all that a text without CUDA headers needs.
#pragma once

#ifndef __SOFTCUDA__
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif
