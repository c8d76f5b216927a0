#pragma once

#include <nanobind/nanobind.h>

void bind_captured(nanobind::module_& m);
