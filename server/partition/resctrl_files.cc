#include "server/partition/resctrl_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "server/memory/shared_memory.h"

namespace superoffload::partition {
namespace {

using memory::FileDescriptor;

class KernelFiles final : public ResctrlFiles {
 public:
  explicit KernelFiles(const std::string& root) : root_(root + "/") {}

  int Read(const std::string& path, std::string* text) override {
    const FileDescriptor fd(::open((root_ + path).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return errno;
    text->clear();
    char buffer[4096];
    ssize_t got;
    while ((got = ::read(fd.get(), buffer, sizeof(buffer))) > 0) text->append(buffer, static_cast<size_t>(got));
    return got < 0 ? errno : 0;
  }

  int Write(const std::string& path, const std::string& text) override {
    const FileDescriptor fd(::open((root_ + path).c_str(), O_WRONLY | O_CLOEXEC));
    if (!fd.valid()) return errno;
    return ::write(fd.get(), text.data(), text.size()) < 0 ? errno : 0;
  }

  int MakeDirectory(const std::string& path) override { return ::mkdir((root_ + path).c_str(), 0755) == 0 ? 0 : errno; }
  int RemoveDirectory(const std::string& path) override { return ::rmdir((root_ + path).c_str()) == 0 ? 0 : errno; }

  int List(const std::string& path, std::vector<std::string>* names) override {
    DIR* const directory = ::opendir((root_ + path).c_str());
    if (directory == nullptr) return errno;
    names->clear();
    while (const dirent* entry = ::readdir(directory)) {
      if (entry->d_name[0] != '.') names->push_back(entry->d_name);
    }
    ::closedir(directory);
    return 0;
  }

  int GiveTo(const std::string& path, uid_t uid) override {
    return ::chown((root_ + path).c_str(), uid, static_cast<gid_t>(-1)) == 0 ? 0 : errno;
  }

  int Lock() override {
    lock_ = FileDescriptor(::open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return lock_.valid() && ::flock(lock_.get(), LOCK_EX) == 0 ? 0 : errno;
  }
  void Unlock() override { lock_ = FileDescriptor(); }

 private:
  const std::string root_;
  FileDescriptor lock_;
};

}  // namespace

std::unique_ptr<ResctrlFiles> KernelResctrlFiles(const std::string& root) {
  return std::make_unique<KernelFiles>(root);
}

}  // namespace superoffload::partition
