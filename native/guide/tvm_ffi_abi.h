// The part of TVM-FFI's C ABI (0.1) that the guide calls. graft declares it here and looks the
// symbols up in the library that Python has loaded. Building graft therefore needs neither headers
// nor a library of TVM-FFI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graft::tvm_ffi {

enum TypeIndex : int32_t { kNone = 0, kInt = 1, kBool = 2, kDLTensorPtr = 7, kFunction = 68 };

struct Object {
  uint64_t reference_counts;
  int32_t type_index;
  uint32_t padding;
  void (*deleter)(void*, int);
};

struct Any {
  int32_t type_index;
  uint32_t padding;
  union {
    int64_t integer;
    double real;
    void* pointer;
    Object* object;
  };
};

struct Bytes {
  const char* data;
  size_t size;
};

// Members of an error object that follow its Object header. TVM-FFI declares further members after
// these, which graft does not read.
struct ErrorCell {
  Bytes kind;
  Bytes message;
};

struct MethodInfo {
  Bytes name;
  Bytes doc;
  Bytes metadata;
  int64_t flags;
  Any method;
};

struct TypeInfo {
  int32_t type_index;
  int32_t type_depth;
  Bytes type_key;
  const TypeInfo** ancestors;
  uint64_t type_key_hash;
  int32_t num_fields;
  int32_t num_methods;
  const void* fields;
  const MethodInfo* methods;
  const void* metadata;
};

struct Version {
  uint32_t major, minor, patch;
};

// DLPack's tensor struct. XGrammar ignores `strides` and `byte_offset`.
struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

constexpr int32_t kDLCPU = 1;
constexpr uint8_t kDLInt = 0;

static_assert(sizeof(Object) == 24 && sizeof(Any) == 16 && sizeof(MethodInfo) == 72 &&
                  sizeof(TypeInfo) == 72 && sizeof(DLTensor) == 48,
              "the C ABI is declared for 64-bit little-endian machines");

}  // namespace graft::tvm_ffi
