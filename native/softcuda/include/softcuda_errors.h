// The error codes of the driver API.
#pragma once

extern "C" {

using CUresult = int;

enum : CUresult {
#define E(code, name) name = code,
#include "softcuda_errors.inc"
#undef E
};

}  // extern "C"
