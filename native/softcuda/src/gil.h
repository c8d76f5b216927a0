// Observation of the Python interpreter of this process, if there is one: requests for the GIL and
// Python stacks (INVARIANTS.md L1 to L5). The soft device is not linked against Python. It looks up
// Python's functions at run time.
#pragma once

#include <string>

namespace softcuda {

// Whether the calling thread holds the GIL; false without an interpreter.
bool gil_held();
// Returns the calling thread's Python stack, innermost frame first, one line per frame. The thread
// must hold the GIL.
std::string python_stack();

// Starts to observe requests for the GIL. From then on, each thread that requests the GIL calls
// `on_request` before it gets the GIL. A thread for which report_first_python_call() is enabled
// also calls `on_python_call` with its Python stack when it enters its next Python function.
void watch_gil(void (*on_request)(), void (*on_python_call)(const std::string& stack));
// Enables or disables `on_python_call` for the calling thread.
void report_first_python_call(bool enabled);
// Also observes requests for the GIL by libraries that were loaded since the last call of this
// function. The device calls it before each host function.
void watch_new_libraries();
// Whether requests for the GIL are observed.
bool gil_watched();

// Redirection of calls between the libraries of this process. A library calls the functions of
// other libraries through its global offset table (GOT). Replacing an entry of this table redirects
// the calls (call_redirection.cpp). `Callers` selects the libraries whose calls are redirected:
// `inside` is the library that contains the address `code`; `outside` is all other libraries.
enum class Callers { inside, outside };
// Redirects the calls of the function `symbol` to `replacement` in the selected libraries. Calls
// that do not go through a GOT, such as most calls inside one library, are not redirected.
void patch_calls(const void* code, Callers callers, const char* symbol, void* replacement);
// Returns the number of libraries that this process has loaded so far, including those that it has
// unloaded.
unsigned long long libraries_loaded();

// Prepares all_python_stacks(): makes Python's faulthandler write the stacks of all threads to an
// in-memory file when a signal arrives. This function does not take the GIL. The interpreter
// registers the handler at its next opportunity.
void prepare_python_stacks();
// Returns the Python stacks of all threads without taking the GIL. Returns "" if there is no
// interpreter or if faulthandler is not registered yet.
std::string all_python_stacks();

}  // namespace softcuda
