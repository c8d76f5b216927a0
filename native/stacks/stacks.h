// Native stacks of the threads of this process, for reports about exceeded deadlines.
//
// Rules:
// 1. A thread takes its own stack, in the handler of a real-time signal that the process does not
//    use otherwise. The signal restarts system calls (SA_RESTART) but may end a sleep early. Stacks
//    are therefore taken only for reports about exceeded deadlines.
// 2. The wait for a thread has a time limit. A thread that answers after the limit writes only to
//    memory that is not read.
// 3. Taking a stack needs no GIL and makes no driver call.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace stacks {

using Frames = std::vector<void*>;

// Returns the call stack of the calling thread, innermost function first. The `skip` innermost
// functions are omitted, counted from the caller of this function.
__attribute__((noinline)) Frames of_this_thread(int skip);
// Returns the call stack of thread `tid` of this process; empty if the thread does not answer
// within `limit_s` seconds.
Frames of_thread(pid_t tid, double limit_s);
// Returns a name for a code address: "name+0x12 (libx.so)", or "libx.so+0x1234" if the library
// exports no symbol for it.
std::string name_of(const void* address);
// Returns one line per frame, innermost first.
std::string format(const Frames& frames, const char* indent);
// Returns a real-time signal without a handler in this process; 0 if there is none.
int free_signal();

}  // namespace stacks
