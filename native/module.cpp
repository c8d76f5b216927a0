// The compiled part of graft: graft.native._native.
#include <nanobind/nanobind.h>

// hostwork/bind.cpp, guide/bind.cpp, labs/launch_loop.cpp
void bind_hostwork(nanobind::module_& m);
void bind_guide(nanobind::module_& m);
void bind_labs(nanobind::module_& m);

NB_MODULE(_native, m) {
  // Threads that are not Python's enter by PyGILState, which knows the main interpreter only (P6).
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    throw nanobind::import_error("graft runs in Python's main interpreter only");
  }
  // Types that outlive the interpreter on purpose (driver threads use them) are no leak.
  nanobind::set_leak_warnings(false);
  bind_hostwork(m);
  bind_guide(m);
  bind_labs(m);
}
