// Redirecting calls between the libraries of this process, by their tables of addresses.
#pragma once

namespace softcuda {

enum class Where { inside, outside };  // the library that contains `code`, or all but that one

// Lets calls of `symbol` made from those libraries go to `replacement`; calls that libraries make
// inside themselves are not seen.
void patch_calls(const void* code, Where where, const char* symbol, void* replacement);
// Grows with every library that is loaded.
unsigned long long libraries_loaded();

}  // namespace softcuda
