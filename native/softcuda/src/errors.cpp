// Error names, the sticky error, and the texts of faults and refused calls
// (INVARIANTS.md E1 to E3).
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace softcuda {
namespace {

struct ErrorName {
  CUresult code;
  const char* name;
  // The text that cuGetErrorString returns: for common errors, NVIDIA's text; for the others, the
  // error's name in lower case, without "CUDA_ERROR_" and with spaces in place of underscores.
  std::string text;
};

ErrorName error_name(CUresult code, const char* name) {
  if (code == CUDA_ERROR_INVALID_VALUE) return {code, name, "invalid argument"};
  if (code == CUDA_ERROR_NOT_INITIALIZED) return {code, name, "initialization error"};
  if (code == CUDA_ERROR_INVALID_DEVICE) return {code, name, "invalid device ordinal"};
  std::string text = std::strncmp(name, "CUDA_ERROR_", 11) == 0 ? name + 11 : "no error";
  for (char& c : text) c = c == '_' ? ' ' : static_cast<char>(std::tolower(c));
  return {code, name, text};
}

const auto& errors = *new std::vector<ErrorName>{
#define E(code, name) error_name(code, #name),
#include "softcuda_errors.inc"
#undef E
};

std::atomic<CUresult> g_sticky{CUDA_SUCCESS};
std::mutex& g_text_mutex = *new std::mutex;
std::string& g_fault_text = *new std::string;
thread_local std::string t_refusal_text;

const ErrorName* find_error(CUresult code) {
  for (const ErrorName& error : errors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

std::string name_or_number(CUresult code) {
  const ErrorName* error = find_error(code);
  return error != nullptr ? error->name : "error " + std::to_string(code);
}

// Appends a fault to the file SOFTCUDA_REPORT as a JSON object on one line, with a single write.
void report_fault_line(CUresult code, const std::string& text) {
  const char* path = std::getenv("SOFTCUDA_REPORT");
  if (path == nullptr || *path == '\0') return;
  const char* kind = text.find(": race in ") != std::string::npos ? "race" : "fault";
  std::string line = "{\"kind\": \"" + std::string(kind) + "\", \"error\": \"" +
                     name_or_number(code) + "\", \"text\": \"";
  for (const char c : text) {
    if (c == '"' || c == '\\') line += '\\';
    line += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  line += "\"}\n";
  std::FILE* file = std::fopen(path, "a");
  if (file == nullptr) return log_line(std::string("softcuda: cannot write to ") + path);
  std::fwrite(line.data(), 1, line.size(), file);
  std::fclose(file);
}

}  // namespace

size_t copy_text(const std::string& text, char* buffer, size_t size) {
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
    if (g_sticky.load() != CUDA_SUCCESS) return;  // a fault was recorded before (INVARIANTS.md E1)
    g_fault_text = text;
    count_live_as_leaked();
    g_sticky.store(code, std::memory_order_release);
  }
  const char* race = std::getenv("SOFTCUDA_RACECHECK");
  const bool checked = race != nullptr && std::strcmp(race, "1") == 0;
  if (settings().log || checked) log_line("softcuda: " + name_or_number(code) + ": " + text);
  report_fault_line(code, text);
}

void refuse(CUresult code, const std::string& text) {
  t_refusal_text = text;
  if (settings().log) {
    log_line("softcuda: refused with " + name_or_number(code) + ": " + text);
  }
  throw Refused{code};
}

}  // namespace softcuda

using namespace softcuda;

#define GET_ERROR(symbol, field)                                     \
  SC_API(symbol, 6000, kAlways, CUresult, code, const char**, out) { \
    require(out != nullptr);                                         \
    const ErrorName* error = find_error(code);                       \
    *out = error != nullptr ? error->field : nullptr;                \
    require(error != nullptr);                                       \
  }
GET_ERROR(cuGetErrorName, name)
GET_ERROR(cuGetErrorString, text.c_str())

// Copies the text of the sticky error and returns its length. The text is "" if there was no fault.
SC_EXPORT size_t softcuda_last_fault(char* buffer, size_t size) {
  std::lock_guard<std::mutex> lock(g_text_mutex);
  return copy_text(g_fault_text, buffer, size);
}

// Copies the error text of the calling thread's last refused call to `buffer` and returns its
// length.
SC_EXPORT size_t softcuda_last_refusal(char* buffer, size_t size) {
  return copy_text(t_refusal_text, buffer, size);
}
