// Preloaded into a daemon: a kernel that starts no thread as long as the file $FAKE_THREADS exists.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) noexcept {
  using Function = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "pthread_create"));
  const char* const control = std::getenv("FAKE_THREADS");
  if (control != nullptr && ::access(control, F_OK) == 0) return EAGAIN;
  return real(thread, attributes, run, argument);
}
