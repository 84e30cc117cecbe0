#include "server/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace superoffload::memory {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

// MemAvailable of /proc/meminfo; no limit where that is missing.
size_t AvailableBytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  for (size_t kibibytes; meminfo >> key >> kibibytes; meminfo.ignore(64, '\n')) {
    if (key == "MemAvailable:") return kibibytes * 1024;
  }
  return std::numeric_limits<size_t>::max();
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    if (valid()) ::close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (valid()) ::close(fd_);
}

int FileDescriptor::Release() { return std::exchange(fd_, -1); }

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, bytes_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

absl::StatusOr<SharedMemory> SharedMemory::Create(const std::string& name, size_t bytes) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  // Allocating more than there is would not fail but call the OOM killer.
  if (const size_t available = AvailableBytes(); bytes > available) {
    return absl::ResourceExhaustedError(absl::StrCat(name, " needs ", bytes, " bytes but the machine has only ",
                                                     available, " available; free memory or offload a smaller model"));
  }
  SharedMemory memory;
  memory.fd_ = FileDescriptor(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("memfd_create of ", name));
  // Nobody may open the memory anew through /proc with more rights than the descriptor it was given.
  if (::fchmod(memory.fd(), 0400) != 0) return absl::ErrnoToStatus(errno, "fchmod of a memfd");
  if (::ftruncate(memory.fd(), static_cast<off_t>(bytes)) != 0 ||
      ::fallocate(memory.fd(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes for ", name, ": ",
                                                     std::strerror(errno), "; free memory or offload a smaller model"));
  }
  if (::fcntl(memory.fd(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ErrnoToStatus(errno, "sealing a memfd");
  }
  if (absl::Status status = memory.Map(name, bytes); !status.ok()) return status;
  return memory;
}

absl::Status SharedMemory::Map(const std::string& name, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
  if (data == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", name));
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  return absl::OkStatus();
}

absl::StatusOr<std::pair<std::string, SharedMemory>> SharedMemory::Open(FileDescriptor fd) {
  constexpr absl::string_view kPrefix = "/memfd:";
  constexpr absl::string_view kSuffix = " (deleted)";
  char link[256];
  const ssize_t length = ::readlink(absl::StrCat("/proc/self/fd/", fd.get()).c_str(), link, sizeof(link));
  absl::string_view name(link, length < 0 ? 0 : static_cast<size_t>(length));
  struct stat file {};
  if (!absl::ConsumePrefix(&name, kPrefix) || !absl::ConsumeSuffix(&name, kSuffix) || ::fstat(fd.get(), &file) != 0 ||
      (::fcntl(fd.get(), F_GET_SEALS) & kSeals) != kSeals) {
    return absl::DataLossError("a descriptor is not memory that a daemon created");
  }
  SharedMemory memory;
  memory.fd_ = std::move(fd);
  if (absl::Status status = memory.Map(std::string(name), static_cast<size_t>(file.st_size)); !status.ok()) {
    return status;
  }
  return std::pair(std::string(name), std::move(memory));
}

absl::StatusOr<FileDescriptor> SharedMemory::OpenReadOnly() const {
  FileDescriptor read_only(::open(absl::StrCat("/proc/self/fd/", fd()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only.valid()) return absl::ErrnoToStatus(errno, "opening a memfd read-only");
  return read_only;
}

}  // namespace superoffload::memory
