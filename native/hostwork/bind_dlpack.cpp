// Capsules of exported arrays.
#include "hostwork/bind.h"

namespace graft::hostwork {
namespace {

constexpr const char* kName = "dltensor";  // a consumer renames the capsule

// The start of DLManagedTensor in dlpack.h: a DLTensor of 48 bytes, the context and the deleter.
struct ManagedTensor {
  unsigned char tensor[48];
  void* context;
  void (*deleter)(ManagedTensor*);
};

// A consumer that refuses the tensor frees the capsule while its exception is raised. The deleter
// runs Python code, which must not see this exception.
void destroy(PyObject* capsule) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (PyCapsule_IsValid(capsule, kName) != 0) {
    auto* const tensor = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kName));
    tensor->deleter(tensor);
  }
  PyErr_Restore(type, value, traceback);
}

}  // namespace

nanobind::object new_dltensor_capsule(std::uint64_t tensor) {
  return nanobind::steal(PyCapsule_New(pointer<void>(tensor), kName, destroy));
}

}  // namespace graft::hostwork
