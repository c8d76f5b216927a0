// Checks of the test programs.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace stress {

[[noreturn]] inline void fail(const char* expression, const char* file, int line,
                              const char* reason = "") {
  std::fprintf(stderr, "%s:%d: %s\n%s\n", file, line, expression, reason);
  std::exit(1);
}

// Ends the program with an error message if the condition is false.
#define WANT(condition) \
  if (!(condition)) stress::fail(#condition, __FILE__, __LINE__)

}  // namespace stress
