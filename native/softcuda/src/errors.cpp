// Error names, the sticky error and its text (invariants E1-E3).
#include <cctype>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace softcuda {
namespace {

struct Named {
  CUresult code;
  const char* name;
  std::string text;  // the name in plain words
};

Named named(CUresult code, const char* name) {
  std::string text = std::strncmp(name, "CUDA_ERROR_", 11) == 0 ? name + 11 : "no error";
  for (char& c : text) c = c == '_' ? ' ' : static_cast<char>(std::tolower(c));
  return {code, name, text};
}

const auto& errors = *new std::vector<Named>{
#define E(code, name) named(code, #name),
#include "cuda_errors.inc"
#undef E
};

std::atomic<CUresult> g_sticky{CUDA_SUCCESS};
std::mutex& g_text_mutex = *new std::mutex;
std::string& g_fault_text = *new std::string;
thread_local std::string t_refusal_text;

const Named* find(CUresult code) {
  for (const Named& e : errors) {
    if (e.code == code) return &e;
  }
  return nullptr;
}

}  // namespace

size_t give(const std::string& text, char* buffer, size_t size) {
  if (buffer != nullptr && size > 0) {
    const size_t n = text.size() < size - 1 ? text.size() : size - 1;
    std::memcpy(buffer, text.data(), n);
    buffer[n] = '\0';
  }
  return text.size();
}

CUresult sticky() { return g_sticky.load(std::memory_order_acquire); }

void log_line(const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); }

std::string hex(unsigned long long value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

void fault(CUresult code, const std::string& text) {
  {
    std::lock_guard<std::mutex> lock(g_text_mutex);
    if (g_sticky.load() != CUDA_SUCCESS) return;  // the first fault is the one that counts
    g_fault_text = text;
    leak_everything();
    g_sticky.store(code, std::memory_order_release);
  }
  if (settings().log) log_line(std::string("softcuda: ") + find(code)->name + ": " + text);
}

void refuse(CUresult code, const std::string& text) {
  t_refusal_text = text;
  if (settings().log) {
    const Named* e = find(code);
    log_line(std::string("softcuda: refused with ") + (e ? e->name : "?") + ": " + text);
  }
  throw Refused{code};
}

}  // namespace softcuda

using namespace softcuda;

#define GET_ERROR(symbol, field)                                     \
  SC_API(symbol, 6000, kAlways, CUresult, code, const char**, out) { \
    need(out != nullptr);                                            \
    const Named* e = find(code);                                     \
    *out = e != nullptr ? e->field : nullptr;                        \
    need(e != nullptr);                                              \
  }
GET_ERROR(cuGetErrorName, name)
GET_ERROR(cuGetErrorString, text.c_str())

// The text of the sticky error ("" when there is none); returns its length.
SC_EXPORT size_t softcuda_last_fault(char* buffer, size_t size) {
  std::lock_guard<std::mutex> lock(g_text_mutex);
  return give(g_fault_text, buffer, size);
}

// Why the calling thread's most recently refused call was refused.
SC_EXPORT size_t softcuda_last_refusal(char* buffer, size_t size) {
  return give(t_refusal_text, buffer, size);
}
