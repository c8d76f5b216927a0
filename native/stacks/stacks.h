// Native stacks of this process's threads, for reports of waits that passed their deadline.
//
// Rules:
// 1. A stack is taken by the thread itself, in a handler of a real-time signal that nobody else in
//    the process uses. What the thread was doing goes on (SA_RESTART), though a sleep may end
//    early: stacks are taken for reports only.
// 2. Nobody waits for a thread for longer than it is given; a thread that answers too late writes
//    into nothing that is read.
// 3. No GIL, no driver call.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace stacks {

using Frames = std::vector<void*>;

// The caller's stack without its innermost `skip` functions.
__attribute__((noinline)) Frames of_this_thread(int skip);
// The stack of another thread of this process; empty when it does not answer within the limit.
Frames of_thread(pid_t tid, double limit_s);
// "name+0x12 (libx.so)" of a code address, or "libx.so+0x1234" where the symbol is not exported.
std::string name_of(const void* address);
// One line per frame, innermost first.
std::string format(const Frames& frames, const char* indent);
// A real-time signal that has no handler in this process; 0 when there is none.
int free_signal();

}  // namespace stacks
