// The extension module graft.native._native.
#include <nanobind/nanobind.h>

// These functions add the Python bindings of a folder to the module. They are defined in
// hostwork/bind.cpp, guide/bind.cpp and labs/launch_loop.cpp.
void bind_hostwork(nanobind::module_& m);
void bind_guide(nanobind::module_& m);
void bind_labs(nanobind::module_& m);

NB_MODULE(_native, m) {
  // Driver threads enter Python through PyGILState, which supports the main interpreter only
  // (hostwork/INVARIANTS.md P6). Its id is 0.
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    throw nanobind::import_error("graft runs in Python's main interpreter only");
  }
  // Types that driver threads use outlive the interpreter on purpose, so nanobind must not report
  // them as leaks.
  nanobind::set_leak_warnings(false);
  bind_hostwork(m);
  bind_guide(m);
  bind_labs(m);
}
