#pragma once

#include <nanobind/nanobind.h>

// Adds the submodule `guide` to graft.native._native.
void bind_guide(nanobind::module_& module);
