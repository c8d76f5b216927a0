#pragma once

#include <nanobind/nanobind.h>

// Adds graft.native._native.labs: what the measuring tools need outside of Python.
void bind_labs(nanobind::module_& m);
