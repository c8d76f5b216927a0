#pragma once

#include <nanobind/nanobind.h>

// Adds the host-work part of graft.native._native.
void bind_hostwork(nanobind::module_& m);
