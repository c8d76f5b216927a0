// The compiled part of graft: graft.native._native.
//
// Each room provides one header with one function:
//   native/hostwork/bind.h   void bind_hostwork(nanobind::module_&)
//   native/guide/bind.h      void bind_guide(nanobind::module_&)
//   native/labs/bind.h       void bind_labs(nanobind::module_&)
// The guide is left out where its header is absent, so that the rooms build independently.
#include <nanobind/nanobind.h>

#include "hostwork/bind.h"
#include "labs/bind.h"
#if __has_include("guide/bind.h")
#include "guide/bind.h"
#define GRAFT_HAS_GUIDE 1
#endif

NB_MODULE(_native, m) {
  // Threads that are not Python's enter by PyGILState, which knows the main interpreter only (P6).
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    throw nanobind::import_error("graft runs in Python's main interpreter only");
  }
  // Types that outlive the interpreter on purpose (driver threads use them) are no leak.
  nanobind::set_leak_warnings(false);
  bind_hostwork(m);
  bind_labs(m);
#ifdef GRAFT_HAS_GUIDE
  bind_guide(m);
#endif
}
