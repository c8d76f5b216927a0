// Native stacks of the threads of this process, for reports about exceeded deadlines.
//
// Rules:
// 1. A thread takes its own stack, in the handler of a real-time signal that the process does not
//    use otherwise. System calls are restarted (SA_RESTART), but a sleep may end early: stacks are
//    taken for reports only.
// 2. The wait for a thread has a time limit. A thread that answers after the limit writes only to
//    memory that is not read.
// 3. No GIL, no driver call.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace stacks {

using Frames = std::vector<void*>;

// Returns the stack of the calling thread without its innermost `skip` functions.
__attribute__((noinline)) Frames of_this_thread(int skip);
// Returns the stack of another thread of this process; empty if it does not answer within the
// limit.
Frames of_thread(pid_t tid, double limit_s);
// Returns "name+0x12 (libx.so)" for a code address, or "libx.so+0x1234" without an exported symbol.
std::string name_of(const void* address);
// Returns one line per frame, innermost first.
std::string format(const Frames& frames, const char* indent);
// Returns a real-time signal without a handler in this process; 0 if there is none.
int free_signal();

}  // namespace stacks
