// A library that takes the place of NVRTC and returns PTX where programs ask for machine code.
//
// The soft device runs PTX but no machine code of GPUs. Programs that compile for a real
// architecture (sm_90) and load the cubin therefore run on the soft device if nvrtcGetCUBIN returns
// PTX. All other functions are forwarded to the NVRTC at the path in SOFTCUDA_NVRTC, which is
// loaded by the first call.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInternalError = 11;  // NVRTC_ERROR_INTERNAL_ERROR

// The functions of NVRTC have at most six parameters, which are integers or pointers, and return an
// integer or a pointer. The calling conventions of x86-64 and aarch64 pass all of them in
// registers, so one type is sufficient to forward them.
using Word = void*;
using Function = Word (*)(Word, Word, Word, Word, Word, Word);

void* load_library() {
  const char* path = std::getenv("SOFTCUDA_NVRTC");
  void* library = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "softcuda: NVRTC cannot be loaded, SOFTCUDA_NVRTC=%s: %s\n",
                 path == nullptr ? "" : path, path == nullptr ? "no path" : dlerror());
  }
  return library;
}

Function find(const char* name) {
  static void* const library = load_library();
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

Word unavailable(Word, Word, Word, Word, Word, Word) {
  return reinterpret_cast<Word>(static_cast<long>(kInternalError));
}

Word no_text(Word, Word, Word, Word, Word, Word) {
  static char text[] = "NVRTC cannot be loaded";
  return text;
}

}  // namespace

#define FORWARD_TO(name, target, otherwise)                                \
  EXPORT Word name(Word a, Word b, Word c, Word d, Word e, Word f) {       \
    static const Function function = find(target);                         \
    return (function != nullptr ? function : otherwise)(a, b, c, d, e, f); \
  }
#define FORWARD(name) FORWARD_TO(name, #name, unavailable)

FORWARD_TO(nvrtcGetCUBINSize, "nvrtcGetPTXSize", unavailable)
FORWARD_TO(nvrtcGetCUBIN, "nvrtcGetPTX", unavailable)
FORWARD_TO(nvrtcGetErrorString, "nvrtcGetErrorString", no_text)

FORWARD(nvrtcVersion)
FORWARD(nvrtcGetNumSupportedArchs)
FORWARD(nvrtcGetSupportedArchs)
FORWARD(nvrtcCreateProgram)
FORWARD(nvrtcDestroyProgram)
FORWARD(nvrtcCompileProgram)
FORWARD(nvrtcAddNameExpression)
FORWARD(nvrtcGetLoweredName)
FORWARD(nvrtcGetPTXSize)
FORWARD(nvrtcGetPTX)
FORWARD(nvrtcGetLTOIRSize)
FORWARD(nvrtcGetLTOIR)
FORWARD(nvrtcGetOptiXIRSize)
FORWARD(nvrtcGetOptiXIR)
FORWARD(nvrtcGetProgramLogSize)
FORWARD(nvrtcGetProgramLog)
#if SOFTCUDA_NVRTC_MAJOR >= 13
FORWARD(nvrtcGetTileIRSize)
FORWARD(nvrtcGetTileIR)
FORWARD(nvrtcInstallBundledHeaders)
FORWARD(nvrtcGetBundledHeadersInfo)
FORWARD(nvrtcRemoveBundledHeaders)
#else
FORWARD(nvrtcGetNVVMSize)
FORWARD(nvrtcGetNVVM)
#endif
FORWARD(nvrtcSetFlowCallback)
FORWARD(nvrtcGetPCHHeapSize)
FORWARD(nvrtcSetPCHHeapSize)
FORWARD(nvrtcGetPCHCreateStatus)
FORWARD(nvrtcGetPCHHeapSizeRequired)
