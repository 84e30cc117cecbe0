#include "server/memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/memory/thread.h"

namespace superoffload::memory {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

absl::Status CannotAllocate(const std::string& name, size_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", bytes, " bytes for ", name, ": ",
                                                   std::strerror(errno), "; free memory or offload a smaller model"));
}

// A value of /proc/meminfo, in its unit; `missing` where it is missing.
size_t MemoryInformation(const std::string& wanted, size_t missing) {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  for (size_t value; meminfo >> key >> value; meminfo.ignore(64, '\n')) {
    if (key == wanted) return value;
  }
  return missing;
}

// 0 where the kernel has none.
size_t HugePageBytes() { return MemoryInformation("Hugepagesize:", 0) * 1024; }
size_t FreeHugePages() { return MemoryInformation("HugePages_Free:", 0); }

// No limit where the kernel does not tell.
size_t AvailableBytes() {
  constexpr size_t kUnknown = std::numeric_limits<size_t>::max() / 1024;
  return MemoryInformation("MemAvailable:", kUnknown) * 1024;
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      bytes_by_node_(std::move(other.bytes_by_node_)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, bytes_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    bytes_by_node_ = std::move(other.bytes_by_node_);
  }
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

absl::StatusOr<SharedMemory> SharedMemory::Create(const std::string& name, size_t bytes, const Binding& binding) {
  const size_t huge_page = HugePageBytes();
  if (binding.huge_pages && binding.from_pool && huge_page > 0 && bytes >= huge_page &&
      FreeHugePages() * huge_page >= bytes) {
    const size_t rounded = (bytes + huge_page - 1) / huge_page * huge_page;
    absl::StatusOr<SharedMemory> memory = CreateWithPages(name, rounded, binding, /*huge=*/true);
    if (memory.ok()) return memory;  // else somebody else took the pages, or they lie on other nodes
  }
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  // Allocating more than there is would not fail but call the OOM killer.
  if (const size_t available = AvailableBytes(); bytes > available) {
    return absl::ResourceExhaustedError(absl::StrCat(name, " needs ", bytes, " bytes but the machine has only ",
                                                     available, " available; free memory or offload a smaller model"));
  }
  return CreateWithPages(name, bytes, binding, /*huge=*/false);
}

absl::StatusOr<SharedMemory> SharedMemory::CreateWithPages(const std::string& name, size_t bytes,
                                                           const Binding& binding, bool huge) {
  SharedMemory memory;
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB : 0u);
  memory.fd_ = FileDescriptor(::memfd_create(name.c_str(), flags));
  if (!memory.fd_.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("memfd_create of ", name));
  // Nobody may open the memory anew through /proc with more rights than the descriptor it was given.
  if (::fchmod(memory.fd(), 0400) != 0) return absl::ErrnoToStatus(errno, "fchmod of a memfd");
  if (::ftruncate(memory.fd(), static_cast<off_t>(bytes)) != 0) return CannotAllocate(name, bytes);
  if (absl::Status status = memory.Map(name, bytes); !status.ok()) return status;
  if (binding.node) {
    if (absl::Status status = BindToNode(memory.data_, bytes, *binding.node); !status.ok()) return status;
  }
  if (binding.huge_pages && !huge) ::madvise(memory.data_, bytes, MADV_HUGEPAGE);  // a wish
  if (absl::Status status = memory.Populate(name); !status.ok()) return status;
  memory.bytes_by_node_ = BytesByNode(memory.data_, bytes);
  if (binding.node && binding.strict) {
    if (absl::Status status = CheckNode(memory.bytes_by_node_, *binding.node); !status.ok()) return status;
  }
  if (::fcntl(memory.fd(), F_ADD_SEALS, kSeals) != 0) return absl::ErrnoToStatus(errno, "sealing a memfd");
  return memory;
}

// By several threads: the kernel zeroes some GB/s per core.
absl::Status SharedMemory::Populate(const std::string& name) {
  constexpr size_t kBytesPerThread = size_t{256} << 20;
  const size_t count =
      std::clamp<size_t>(bytes_ / kBytesPerThread, 1, std::max(1u, std::thread::hardware_concurrency()));
  const size_t page = std::max(HugePageBytes(), static_cast<size_t>(::sysconf(_SC_PAGESIZE)));
  std::atomic<int> error{0};
  std::vector<std::thread> threads;
  const auto populate = [this, count, page, &error](size_t i) {
    const size_t first = bytes_ / page * i / count * page;
    const size_t end = i + 1 == count ? bytes_ : bytes_ / page * (i + 1) / count * page;
    if (end > first && ::madvise(data_ + first, end - first, MADV_POPULATE_WRITE) != 0) error = errno;
  };
  for (size_t i = 1; i < count; ++i) {
    absl::StatusOr<std::thread> thread = StartThread("so-populate", [&populate, i] { populate(i); });
    if (thread.ok()) {
      threads.push_back(*std::move(thread));
    } else {
      populate(i);
    }
  }
  populate(0);
  for (std::thread& thread : threads) thread.join();
  if (error == 0) return absl::OkStatus();
  // Kernels before 5.14.
  if (error == EINVAL && ::fallocate(fd(), 0, 0, static_cast<off_t>(bytes_)) == 0) return absl::OkStatus();
  errno = error;
  return CannotAllocate(name, bytes_);
}

absl::Status SharedMemory::Map(const std::string& name, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
  if (data == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", name));
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  return absl::OkStatus();
}

absl::StatusOr<std::pair<std::string, SharedMemory>> SharedMemory::Open(FileDescriptor& fd) {
  constexpr absl::string_view kPrefix = "/memfd:";
  constexpr absl::string_view kSuffix = " (deleted)";
  char link[256];
  const ssize_t length = ::readlink(absl::StrCat("/proc/self/fd/", fd.get()).c_str(), link, sizeof(link));
  absl::string_view name(link, length < 0 ? 0 : static_cast<size_t>(length));
  struct stat file{};
  if (!absl::ConsumePrefix(&name, kPrefix) || !absl::ConsumeSuffix(&name, kSuffix) || ::fstat(fd.get(), &file) != 0 ||
      (::fcntl(fd.get(), F_GET_SEALS) & kSeals) != kSeals) {
    return absl::DataLossError("a descriptor is not memory that a daemon created");
  }
  SharedMemory memory;
  memory.fd_ = std::move(fd);
  if (absl::Status status = memory.Map(std::string(name), static_cast<size_t>(file.st_size)); !status.ok()) {
    fd = memory.Release();
    return status;
  }
  memory.bytes_by_node_ = BytesByNode(memory.data_, memory.bytes_);
  return std::pair(std::string(name), std::move(memory));
}

FileDescriptor SharedMemory::Release() {
  FileDescriptor fd = std::move(fd_);
  *this = SharedMemory();
  return fd;
}

absl::StatusOr<FileDescriptor> SharedMemory::Duplicate() const {
  FileDescriptor duplicate(::fcntl(fd(), F_DUPFD_CLOEXEC, 0));
  if (!duplicate.valid()) return absl::ErrnoToStatus(errno, "duplicating a descriptor");
  return duplicate;
}

absl::StatusOr<FileDescriptor> SharedMemory::OpenReadOnly() const {
  FileDescriptor read_only(::open(absl::StrCat("/proc/self/fd/", fd()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only.valid()) return absl::ErrnoToStatus(errno, "opening a memfd read-only");
  return read_only;
}

}  // namespace superoffload::memory
