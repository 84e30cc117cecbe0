// The file operations that the resctrl file system is driven with. A seam: tests bring a tree that enforces the
// kernel's rules.
#ifndef SUPEROFFLOAD_SERVER_PARTITION_RESCTRL_FILES_H_
#define SUPEROFFLOAD_SERVER_PARTITION_RESCTRL_FILES_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

namespace superoffload::partition {

// Paths are relative to the root of the file system. Every call returns 0 or an errno.
class ResctrlFiles {
 public:
  virtual ~ResctrlFiles() = default;
  virtual int Read(const std::string& path, std::string* text) = 0;
  virtual int Write(const std::string& path, const std::string& text) = 0;
  virtual int MakeDirectory(const std::string& path) = 0;
  virtual int RemoveDirectory(const std::string& path) = 0;
  virtual int List(const std::string& path, std::vector<std::string>* names) = 0;
  virtual int GiveTo(const std::string& path, uid_t uid) = 0;
  // Held by whoever changes anything, as the kernel's documentation asks for. Unlock after Lock only.
  virtual int Lock() = 0;
  virtual void Unlock() = 0;
};

// The kernel's, mounted at `root`.
std::unique_ptr<ResctrlFiles> KernelResctrlFiles(const std::string& root = "/sys/fs/resctrl");

}  // namespace superoffload::partition

#endif  // SUPEROFFLOAD_SERVER_PARTITION_RESCTRL_FILES_H_
