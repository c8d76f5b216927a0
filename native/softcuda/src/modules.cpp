// Loading of kernel images. An image is an ELF shared library; each worker loads a private copy of
// it (INVARIANTS.md K1 to K4).
#include "modules.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "ptx_library.h"

namespace softcuda {

namespace {

// Returns the size of an image in bytes. cuModuleLoadData has no parameter for the size, so it is
// computed from the section header table at the end of the ELF file.
size_t image_size(const void* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  require(
      std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_ident[EI_CLASS] == ELFCLASS64,
      CUDA_ERROR_INVALID_IMAGE,
      "the image is not a 64-bit ELF file; compile kernels for the soft device with compile_cpu()");
  constexpr unsigned kEmCuda = 190;
#if defined(__x86_64__)
  constexpr unsigned kMachine = EM_X86_64;
#else
  constexpr unsigned kMachine = EM_AARCH64;
#endif
  require(
      header.e_machine == kMachine, CUDA_ERROR_NO_BINARY_FOR_GPU,
      header.e_machine == kEmCuda
          ? "the image contains machine code of a GPU, which the soft device cannot run: compile "
            "to PTX, or run the program with graft soft --code ptx"
          : "the image was compiled for another processor");
  return header.e_shoff + static_cast<size_t>(header.e_shentsize) * header.e_shnum;
}

// Returns a path of an open file that no earlier call has returned. dlopen would return the library
// that was loaded first if two files had the same path, and descriptor numbers are reused. The path
// therefore encodes a counter: each bit is written as "./" or ".//", which does not change the file
// to which the path leads.
std::string unique_path(int descriptor) {
  static std::atomic<unsigned> counter{1};
  std::string path = "/proc/self/fd/";
  for (unsigned bits = counter++; bits != 0; bits >>= 1) path += bits & 1 ? "./" : ".//";
  return path + std::to_string(descriptor);
}

void* load_copy(const void* image, size_t size) {
  const int descriptor = memfd_create("softcuda-kernel", MFD_CLOEXEC);
  require(descriptor >= 0, CUDA_ERROR_INVALID_IMAGE, "memfd_create failed");
  const char* from = static_cast<const char*>(image);
  for (size_t written = 0; written < size;) {
    const ssize_t n = write(descriptor, from + written, size - written);
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  void* library = dlopen(unique_path(descriptor).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(descriptor);
  if (library == nullptr) refuse(CUDA_ERROR_INVALID_IMAGE, dlerror());
  return library;
}

}  // namespace

namespace {

// Creates the handles of a loaded module and of its functions.
CUmodule register_module(const std::shared_ptr<Module>& module) {
  for (auto& function : module->functions) {
    function->module = module;
    function->handle = functions.add(function);
  }
  module->handle = modules.add(module);
  live_add(Resource::module, 1);
  return static_cast<CUmodule>(module->handle);
}

}  // namespace

CUmodule load_ptx(const std::vector<std::string>& texts, std::string* log) {
  auto module = std::make_shared<Module>();
  ptx::load(texts, module.get(), log);
  return register_module(module);
}

CUmodule load_module(const void* image, std::string* log) {
  require(image != nullptr);
  if (ptx::is_ptx(image)) {
    std::string unused;
    return load_ptx(ptx::unpack_texts(static_cast<const char*>(image)),
                    log != nullptr ? log : &unused);
  }
  const size_t size = image_size(image);
  install_fault_handlers();
  auto module = std::make_shared<Module>();
  for (unsigned worker = 0; worker < settings().workers; ++worker) {
    void* library = load_copy(image, size);
    module->libraries.push_back(library);
    auto* table = static_cast<const softcuda_image*>(dlsym(library, "softcuda_image_v"));
    require(table != nullptr, CUDA_ERROR_INVALID_IMAGE,
            "the image was not compiled by compile_cpu(): it has no kernel table");
    if (table->abi != SOFTCUDA_ABI) {
      refuse(CUDA_ERROR_INVALID_IMAGE, "the image was built for kernel ABI " +
                                           std::to_string(table->abi) + ", but this device uses " +
                                           std::to_string(SOFTCUDA_ABI) + "; compile it again");
    }
    *table->hooks = &kHooks;
    for (unsigned i = 0; i < table->nentries; ++i) {
      if (worker == 0) {
        module->functions.push_back(std::make_shared<Function>());
        module->functions[i]->name = table->entries[i]->name;
      }
      module->functions[i]->copies.push_back(table->entries[i]);
      module->functions[i]->images.push_back(table);
    }
  }
  return register_module(module);
}

void unload_module(void* handle, const char* description) {
  wait_to_free(description);
  require(sticky() == CUDA_SUCCESS, sticky());
  const auto module = modules.remove(handle);
  module->live = false;
  for (auto& function : module->functions) functions.take(function->handle);
  module->functions.clear();  // breaks the reference cycle between module and functions
  live_add(Resource::module, -1);
}

Module::~Module() {
  for (void* library : libraries) dlclose(library);
}

}  // namespace softcuda
