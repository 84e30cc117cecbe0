// Preloaded into a daemon: a disk that fails or is slow, for files whose path contains ".partial". What it does is read
// from the file $FAKE_DISK at each call: "ok", "slow", "hang", or the errno that writes ("write 28") or syncs ("sync
// 5") end with.
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr useconds_t kSlowMicroseconds = 20'000;

bool IsCheckpoint(int fd) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof(path) - 1);
  if (length < 0) return false;
  path[length] = '\0';
  return std::strstr(path, ".partial") != nullptr;
}

// The errno for this kind of call; 0 for none.
int Fault(const char* call) {
  const char* const control = std::getenv("FAKE_DISK");
  std::FILE* file = control == nullptr ? nullptr : std::fopen(control, "r");
  if (file == nullptr) return 0;
  char word[16] = "";
  int error = 0;
  const int fields = std::fscanf(file, "%15s %d", word, &error);
  std::fclose(file);
  if (fields >= 1 && std::strcmp(word, "slow") == 0) ::usleep(kSlowMicroseconds);
  while (fields >= 1 && std::strcmp(word, "hang") == 0) ::pause();
  return fields == 2 && std::strcmp(word, call) == 0 ? error : 0;
}

template <typename Function>
Function Real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  static const auto real = Real<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  if (IsCheckpoint(fd)) {
    if (const int error = Fault("write"); error != 0) {
      errno = error;
      return -1;
    }
  }
  return real(fd, data, bytes, offset);
}

int fsync(int fd) {
  static const auto real = Real<int (*)(int)>("fsync");
  if (IsCheckpoint(fd)) {
    if (const int error = Fault("sync"); error != 0) {
      errno = error;
      return -1;
    }
  }
  return real(fd);
}

}  // extern "C"
