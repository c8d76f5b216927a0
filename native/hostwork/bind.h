// Python bindings of hostwork. Arguments are converted with the GIL held, and every driver call is
// made with the GIL released. Functions return the driver's result codes, which Python code
// converts to exceptions. Handles and addresses are passed as integers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace graft::hostwork {

void bind_work(nanobind::module_& m);   // bind_work.cpp: records, eager work, captures, mailboxes
void bind_ranks(nanobind::module_& m);  // bind_ranks.cpp: MPI messages

// bind_dlpack.cpp: returns a DLPack capsule of an unversioned DLManagedTensor at this address. A
// capsule that is freed without having been consumed calls the tensor's deleter.
nanobind::object new_dltensor_capsule(std::uint64_t tensor);

template <typename T>
T* pointer(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

inline std::uint64_t address_of(const void* pointer) {
  return reinterpret_cast<std::uint64_t>(pointer);
}

}  // namespace graft::hostwork
