// The Python interpreter of this process, if there is one, as observed from the driver (invariants
// L1-L5). The soft device is not linked against Python; it looks symbols up at run time.
#pragma once

#include <string>

namespace softcuda {

bool gil_held();
// Returns the calling thread's Python stack, innermost frame first, one line per frame. The thread
// must hold the GIL.
std::string python_stack();

// Starts to observe requests for the GIL. `on_request` is called on the requesting thread before it
// gets the GIL; `on_python_call` when the first Python function that it then calls begins.
void watch_gil(void (*on_request)(), void (*on_python_call)(const std::string& stack));
// Sets whether `on_python_call` is called for this thread's next Python call.
void report_first_python_call(bool enabled);
// Extends the observation to libraries that were loaded since. Called before each host function.
void watch_new_libraries();
// Whether requests for the GIL are observed.
bool gil_watched();

// Interposition of calls between the libraries of this process, by their GOTs (got.cpp).
enum class Callers { inside, outside };  // the library that contains `code`, or all others
// Redirects calls of `symbol` from those libraries to `replacement`. Calls that do not go through
// a GOT, such as most calls inside one library, are not redirected.
void patch_calls(const void* code, Callers callers, const char* symbol, void* replacement);
// Number of libraries loaded so far; it never decreases.
unsigned long long libraries_loaded();

// Registers Python's faulthandler to write its stacks to an in-memory file on a signal. Does not
// take the GIL.
void prepare_python_stacks();
// Returns the Python stacks of all threads without taking the GIL; "" without an interpreter.
std::string all_python_stacks();

}  // namespace softcuda
