// A kernel that does nothing but wait for the previous kernel of its lane. conditional.py uses it
// to find out whether the driver accepts programmatic edges in the bodies of conditionals.
#include "graft.cuh"

extern "C" __global__ void wait_only() { wait_for_previous_kernel(); }
