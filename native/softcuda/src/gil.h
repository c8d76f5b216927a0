// Observation of the Python interpreter of this process, if there is one: requests for the GIL and
// Python stacks (invariants L1-L5). The soft device is not linked against Python. It looks up
// Python's functions at run time.
#pragma once

#include <string>

namespace softcuda {

// Whether the calling thread holds the GIL; false without an interpreter.
bool gil_held();
// Returns the calling thread's Python stack, innermost frame first, one line per frame. The thread
// must hold the GIL.
std::string python_stack();

// Starts to observe requests for the GIL. `on_request` is called on the requesting thread before
// that thread gets the GIL. `on_python_call` is called when the same thread then enters its first
// Python function, if report_first_python_call(true) was called on it. It receives the Python
// stack.
void watch_gil(void (*on_request)(), void (*on_python_call)(const std::string& stack));
// Sets whether `on_python_call` is called when the calling thread enters its next Python function.
void report_first_python_call(bool enabled);
// Extends the observation to libraries that were loaded since the last call. Called before each
// host function.
void watch_new_libraries();
// Whether requests for the GIL are observed.
bool gil_watched();

// Redirection of calls between the libraries of this process. A library calls functions of other
// libraries through its global offset table (GOT), whose entries can be replaced (got.cpp).
// Whose calls are redirected: those of the library that contains `code`, or of all other libraries.
enum class Callers { inside, outside };
// Redirects calls of `symbol` that these libraries make to `replacement`. Calls that do not go
// through a GOT, such as most calls inside one library, are not redirected.
void patch_calls(const void* code, Callers callers, const char* symbol, void* replacement);
// Returns the number of libraries that were loaded so far. It never decreases.
unsigned long long libraries_loaded();

// Makes Python's faulthandler write the stacks of all threads to an in-memory file when a certain
// signal arrives. Does not take the GIL; the interpreter registers the handler at its next
// opportunity.
void prepare_python_stacks();
// Returns the Python stacks of all threads without taking the GIL. Returns "" without an
// interpreter or before faulthandler is registered.
std::string all_python_stacks();

}  // namespace softcuda
