// Linking of PTX texts (cuLink*). cuLinkComplete links the texts to find errors, and returns an
// image that contains the texts. cuModuleLoadData links them again.
#include <fstream>
#include <iterator>

#include "ptx_library.h"

using namespace softcuda;

using CUlinkState = struct CUlinkState_opaque*;

namespace {

// State between cuLinkCreate and cuLinkDestroy.
struct LinkState {
  void* handle = nullptr;
  std::vector<std::string> texts;
  std::string image;  // owned by the state, see cuLinkComplete
  // The options of cuLinkCreate. The caller must keep the array `values` and the buffers in it
  // until the state is destroyed.
  std::vector<int> options;
  void** values = nullptr;
  void report(const std::string& text) {
    write_error_log(static_cast<unsigned>(options.size()), options.data(), values, text);
  }
};

Handles<LinkState>& link_states =
    *new Handles<LinkState>(0x5c000000000000, "the linker state is unknown or was destroyed");

// Checks that texts can be linked: loads and unloads them. Writes an error to the state's log.
void check(LinkState& state, const std::vector<std::string>& texts) {
  std::string log;
  try {
    Module module;
    ptx::load(texts, &module, &log);
  } catch (const Refused&) {
    state.report(log);
    throw;
  }
}

void add(CUlinkState handle, int type, std::string text) {
  constexpr int kPtx = 1;  // CU_JIT_INPUT_PTX
  const auto state = link_states.find(handle);
  require(state->image.empty(), CUDA_ERROR_INVALID_VALUE, "the linker state is complete");
  if (type != kPtx) {
    refuse(CUDA_ERROR_NOT_SUPPORTED,
           "the soft device links only PTX (CU_JIT_INPUT_PTX), not inputs of type " +
               std::to_string(type));
  }
  text.resize(text.find_last_not_of('\0') + 1);
  std::string log;
  try {
    ptx::check_syntax(text, &log);
  } catch (const Refused&) {
    state->report(log);
    throw;
  }
  state->texts.push_back(std::move(text));
}

}  // namespace

SC_API(cuLinkCreate_v2, 6050, kContext, unsigned, n, int*, options, void**, values, CUlinkState*,
       out) {
  require(out != nullptr && (n == 0 || (options != nullptr && values != nullptr)));
  auto state = std::make_shared<LinkState>();
  state->options.assign(options, options + n);
  state->values = values;
  state->handle = link_states.add(state);
  *out = static_cast<CUlinkState>(state->handle);
}

SC_API(cuLinkAddData_v2, 6050, kContext, CUlinkState, handle, int, type, void*, data, size_t, size,
       const char*, name, unsigned, n, int*, options, void**, values) {
  require(data != nullptr && size != 0);
  add(handle, type, std::string(static_cast<const char*>(data), size));
}

SC_API(cuLinkAddFile_v2, 6050, kContext, CUlinkState, handle, int, type, const char*, path,
       unsigned, n, int*, options, void**, values) {
  require(path != nullptr);
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(CUDA_ERROR_FILE_NOT_FOUND, std::string("cannot read ") + path);
  add(handle, type,
      std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>()));
}

SC_API(cuLinkComplete, 5050, kContext, CUlinkState, handle, void**, image, size_t*, size) {
  require(image != nullptr);
  const auto state = link_states.find(handle);
  require(!state->texts.empty(), CUDA_ERROR_INVALID_VALUE, "the linker state has no inputs");
  if (state->image.empty()) {
    check(*state, state->texts);
    state->image = ptx::pack_texts(state->texts);
  }
  *image = &state->image[0];
  if (size != nullptr) *size = state->image.size();
}

SC_API(cuLinkDestroy, 5050, 0, CUlinkState, handle) { link_states.remove(handle); }
