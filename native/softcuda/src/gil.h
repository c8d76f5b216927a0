// The interpreter of this process, if it has one, seen from the driver (invariants L1-L5).
//
// The soft device is not linked with Python: functions are looked up when they are there.
#pragma once

#include <string>

namespace softcuda {

bool gil_held();
// The calling thread's Python stack, innermost first, a line per frame; the thread holds the GIL.
std::string python_stack();

// Starts to see when a thread asks for the GIL; `asked` is called on that thread, before the GIL is
// given to it, and `entered` when the first Python function it calls begins.
void watch_gil(void (*asked)(), void (*entered)(const std::string& stack));
// Whether this thread's next entry into Python shall be told to `entered`.
void name_first_python_call(bool wanted);
// Looks for libraries that were loaded since; called before a host function runs.
void watch_new_libraries();
// Whether requests for the GIL are seen now.
bool gil_watched();

// Redirecting calls between the libraries of this process, by their tables of addresses (got.cpp).
enum class Where { inside, outside };  // the library that contains `code`, or all but that one
// Lets calls of `symbol` made from those libraries go to `replacement`; calls that libraries make
// inside themselves are not seen.
void patch_calls(const void* code, Where where, const char* symbol, void* replacement);
// Grows with every library that is loaded.
unsigned long long libraries_loaded();

// Lets Python's fault handler write its stacks to a file of ours when asked; needs no GIL.
void prepare_python_stacks();
// Python's stacks of all threads, taken without the GIL; "" without Python.
std::string all_python_stacks();

}  // namespace softcuda
