// What the keeper keeps for the daemon: descriptors by name, as the daemon's messages say (keeper_protocol.h).
#ifndef SUPEROFFLOAD_SERVER_HOST_KEPT_DESCRIPTORS_H_
#define SUPEROFFLOAD_SERVER_HOST_KEPT_DESCRIPTORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/memory/shared_memory.h"

namespace superoffload::host {

// What the daemon has said of itself.
struct DaemonWord {
  bool ready = false;
  bool stopped = false;             // it exits on purpose
  memory::FileDescriptor listener;  // of the keeper's socket
};

// Not thread-safe.
class KeptDescriptors {
 public:
  // Takes and obeys what can be read from the daemon's `link` without waiting, and notes in `word` what it says of
  // itself. False at the end of the connection.
  bool ReceiveAll(int link, DaemonWord& word);

  struct Kept {
    std::string name;
    memory::FileDescriptor fd;
  };
  const std::vector<Kept>& all() const { return kept_; }

  // Whether it is no optimizer's memory, for which a daemon has to be started again.
  bool empty() const;

  // False: nothing has that name.
  bool Drop(const std::string& name);

  // Of each optimizer's memory, by name.
  std::map<std::string, int64_t> Bytes() const;

  // For the log.
  std::string Text() const;

 private:
  enum class Received : uint8_t { kMessage, kNothing, kEnd };

  Received Receive(int link, DaemonWord& word);
  void Obey(const std::string& message, std::vector<memory::FileDescriptor> fds, bool truncated, DaemonWord& word);

  std::vector<Kept> kept_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_KEPT_DESCRIPTORS_H_
