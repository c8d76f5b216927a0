// Redirection of calls by patching entries of the global offset tables (GOTs) of loaded libraries.
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "gil.h"

namespace softcuda {
namespace {

// The arguments of patch_calls().
struct Patch {
  uintptr_t code;
  Callers callers;
  const char* symbol;
  void* replacement;
};

// Writes a GOT entry. A GOT may be read-only after relocation (RELRO), so its page is made writable
// first.
void write_slot(void** slot, void* value) {
  if (__atomic_load_n(slot, __ATOMIC_RELAXED) == value) return;
  const auto page = static_cast<uintptr_t>(getpagesize());
  void* begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / page * page);
  if (mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return;
  __atomic_store_n(slot, value, __ATOMIC_RELEASE);
}

// Whether a relocation of this type fills a GOT entry with the address of a function.
bool is_slot(unsigned long type) {
#if defined(__x86_64__)
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT;
#else
  return (void)type, false;
#endif
}

void patch_table(const dl_phdr_info& object, const ElfW(Rela) * entries, size_t bytes,
                 const ElfW(Sym) * symbols, const char* names, const Patch& patch) {
  for (size_t i = 0; entries != nullptr && i < bytes / sizeof *entries; ++i) {
    if (!is_slot(ELF64_R_TYPE(entries[i].r_info))) continue;
    const char* name = names + symbols[ELF64_R_SYM(entries[i].r_info)].st_name;
    if (std::strcmp(name, patch.symbol) != 0) continue;
    write_slot(reinterpret_cast<void**>(object.dlpi_addr + entries[i].r_offset), patch.replacement);
  }
}

int patch_object(dl_phdr_info* object, size_t, void* data) {
  const Patch& patch = *static_cast<const Patch*>(data);
  const ElfW(Dyn)* dynamic = nullptr;
  bool inside = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr) & part = object->dlpi_phdr[i];
    const uintptr_t begin = object->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    inside = inside ||
             (part.p_type == PT_LOAD && patch.code >= begin && patch.code < begin + part.p_memsz);
  }
  if (dynamic == nullptr || inside != (patch.callers == Callers::inside)) return 0;
  uintptr_t calls = 0, data_table = 0, symbols = 0, names = 0;
  size_t call_bytes = 0, data_bytes = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const uintptr_t value = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_JMPREL) calls = value;
    if (dynamic->d_tag == DT_PLTRELSZ) call_bytes = value;
    if (dynamic->d_tag == DT_RELA) data_table = value;
    if (dynamic->d_tag == DT_RELASZ) data_bytes = value;
    if (dynamic->d_tag == DT_SYMTAB) symbols = value;
    if (dynamic->d_tag == DT_STRTAB) names = value;
  }
  // The dynamic section of the Linux kernel's vDSO contains offsets in place of the addresses
  // `symbols` and `names`. The vDSO is skipped, because it imports no functions.
  if (symbols < object->dlpi_addr || names == 0) return 0;
  const auto* table = reinterpret_cast<const ElfW(Sym)*>(symbols);
  const auto* text = reinterpret_cast<const char*>(names);
  patch_table(*object, reinterpret_cast<const ElfW(Rela)*>(calls), call_bytes, table, text, patch);
  patch_table(*object, reinterpret_cast<const ElfW(Rela)*>(data_table), data_bytes, table, text,
              patch);
  return 0;
}

int read_loaded(dl_phdr_info* object, size_t, void* data) {
  *static_cast<unsigned long long*>(data) = object->dlpi_adds;
  return 1;
}

}  // namespace

void patch_calls(const void* code, Callers callers, const char* symbol, void* replacement) {
  Patch patch{reinterpret_cast<uintptr_t>(code), callers, symbol, replacement};
  dl_iterate_phdr(patch_object, &patch);
}

unsigned long long libraries_loaded() {
  unsigned long long count = 0;
  dl_iterate_phdr(read_loaded, &count);
  return count;
}

}  // namespace softcuda
