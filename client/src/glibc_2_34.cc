// What libstdc++ and libgcc, linked statically, ask of a glibc that is newer than 2.34: so that what is built here is
// loaded by the machine's own Python on Ubuntu 22.04 and RHEL 9, too. Debian 12's libstdc++ takes random numbers from
// arc4random (2.36), and its unwinder finds a function's object with _dl_find_object (2.35); older ones used what is
// called here.
#include <dlfcn.h>
#include <link.h>
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)

extern "C" {

[[gnu::visibility("hidden")]] uint32_t arc4random() noexcept;
[[gnu::visibility("hidden")]] int _dl_find_object(void* address, dl_find_object* result) noexcept;

uint32_t arc4random() noexcept {
  uint32_t value;
  if (::getrandom(&value, sizeof(value), 0) != sizeof(value)) std::abort();  // so small a request is never cut off
  return value;
}

int _dl_find_object(void* address, dl_find_object* result) noexcept {
  struct Search {
    ElfW(Addr) address;
    dl_find_object* result;
  } search{reinterpret_cast<ElfW(Addr)>(address), result};
  const auto visit = [](dl_phdr_info* object, size_t, void* data) {
    auto& [address, result] = *static_cast<Search*>(data);
    bool found = false;
    void* eh_frame = nullptr;
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const ElfW(Phdr) & segment = object->dlpi_phdr[i];
      const ElfW(Addr) begin = object->dlpi_addr + segment.p_vaddr;
      if (segment.p_type == PT_GNU_EH_FRAME) eh_frame = reinterpret_cast<void*>(begin);
      if (segment.p_type != PT_LOAD || address - begin >= segment.p_memsz) continue;
      found = true;
      result->dlfo_map_start = reinterpret_cast<void*>(begin);
      result->dlfo_map_end = reinterpret_cast<void*>(begin + segment.p_memsz);
    }
    if (found) result->dlfo_eh_frame = eh_frame;
    return found && eh_frame != nullptr ? 1 : 0;
  };
  *result = {};
  return ::dl_iterate_phdr(visit, &search) == 1 ? 0 : -1;
}

}  // extern "C"

#endif
