// A library that takes the place of nvJitLink, so that programs link PTX with the driver.
//
// nvJitLink links PTX to machine code of GPUs, which the soft device does not run. Programs look up
// nvJitLinkVersion; if it is missing, cuda.core and numba-cuda link with the functions of the
// driver, and the soft device then receives PTX. Libraries that were linked with nvJitLink, such as
// the cuSPARSE of torch, need functions with the version in their names in order to be loaded.
// These functions fail.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kInternalError = 6;  // NVJITLINK_ERROR_INTERNAL
}

#define FAIL(name, major, minor) \
  EXPORT int name##_##major##_##minor() { return kInternalError; }
#define FAIL_VERSIONS(name) FAIL_MAJOR(name, SOFTCUDA_NVJITLINK_MAJOR)
#define FAIL_MAJOR(name, major) FAIL_MINORS(name, major)
#define FAIL_MINORS(name, major) \
  FAIL(name, major, 0)           \
  FAIL(name, major, 1)           \
  FAIL(name, major, 2)           \
  FAIL(name, major, 3)           \
  FAIL(name, major, 4)           \
  FAIL(name, major, 5)           \
  FAIL(name, major, 6)           \
  FAIL(name, major, 7)           \
  FAIL(name, major, 8)           \
  FAIL(name, major, 9)

FAIL_VERSIONS(__nvJitLinkAddData)
FAIL_VERSIONS(__nvJitLinkAddFile)
FAIL_VERSIONS(__nvJitLinkComplete)
FAIL_VERSIONS(__nvJitLinkCreate)
FAIL_VERSIONS(__nvJitLinkDestroy)
FAIL_VERSIONS(__nvJitLinkGetErrorLog)
FAIL_VERSIONS(__nvJitLinkGetErrorLogSize)
FAIL_VERSIONS(__nvJitLinkGetInfoLog)
FAIL_VERSIONS(__nvJitLinkGetInfoLogSize)
FAIL_VERSIONS(__nvJitLinkGetLinkedCubin)
FAIL_VERSIONS(__nvJitLinkGetLinkedCubinSize)
FAIL_VERSIONS(__nvJitLinkGetLinkedLTOIR)
FAIL_VERSIONS(__nvJitLinkGetLinkedLTOIRSize)
FAIL_VERSIONS(__nvJitLinkGetLinkedPtx)
FAIL_VERSIONS(__nvJitLinkGetLinkedPtxSize)
