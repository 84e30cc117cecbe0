// The daemon's end of the connection to its keeper (keeper_protocol.h). Whatever the keeper does, the daemon goes on:
// one that reads nothing gets its messages later, and one that dies is replaced by another, which gets every
// descriptor.
#ifndef SUPEROFFLOAD_SERVER_HOST_KEEPER_LINK_H_
#define SUPEROFFLOAD_SERVER_HOST_KEEPER_LINK_H_

#include <sys/types.h>

#include <deque>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/memory/shared_memory.h"

namespace superoffload::host {

// Thread-safe. Nothing here waits for the keeper.
class KeeperLink {
 public:
  // `socket` is connected to a keeper that has `kept` already, by name; it gets them back when it must be replaced, so
  // they stay open, as those of Keep, until Drop or Stop.
  KeeperLink(memory::FileDescriptor socket, std::map<std::string, std::vector<int>> kept);
  ~KeeperLink();

  // `listener` is what the keeper answers operators on.
  void Ready(memory::FileDescriptor listener);
  void Keep(const std::string& name, const std::vector<int>& fds);
  void Drop(const std::string& name);

  // From here on a keeper that dies is not replaced, and no descriptor that was kept is used.
  void Stop();

  // The last word: the process exits on purpose.
  void Stopped();

 private:
  struct Message {
    std::string text;
    std::string name;  // whose descriptors go with it; empty for none
    bool with_listener = false;
  };

  std::vector<int> DescriptorsOf(const Message& message) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Post(Message message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Send(const Message& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();
  void Replace();
  void Wake();

  memory::FileDescriptor wake_;  // an eventfd
  absl::Mutex mu_;
  memory::FileDescriptor socket_ ABSL_GUARDED_BY(mu_);  // replaced by the thread only
  pid_t keeper_ = 0;                                    // one that this process has started; the thread's own
  absl::Time replaced_ = absl::InfinitePast();          // likewise
  std::map<std::string, std::vector<int>> kept_ ABSL_GUARDED_BY(mu_);
  std::deque<Message> queue_ ABSL_GUARDED_BY(mu_);  // what the keeper has not read yet
  int refusal_ ABSL_GUARDED_BY(mu_) =
      0;  // an errno: why the last message could not be sent, if it is not that the socket is full
  bool ready_ ABSL_GUARDED_BY(mu_) = false;
  memory::FileDescriptor listener_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_KEEPER_LINK_H_
