// The frames of HTTP/2 (RFC 9113, section 4.1) in a stream of bytes: what a connection asks for, without what it says.
//
//   +-----------+------+-------+--------+---------
//   | length 3  | type | flags | stream | payload: `length` bytes
//   +-----------+------+-------+--------+---------   all big-endian
#ifndef SUPEROFFLOAD_SERVER_HOST_HTTP2_FRAMES_H_
#define SUPEROFFLOAD_SERVER_HOST_HTTP2_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace superoffload::host {

struct Http2Frame {
  enum Type : uint8_t { kData = 0, kHeaders = 1, kResetStream = 3, kContinuation = 9 };
  enum Flag : uint8_t { kEndStream = 1, kEndHeaders = 4 };

  uint32_t length = 0;
  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;  // 0: of the connection itself
};

// Reads one direction of a connection, however its bytes are cut.
class Http2Frames {
 public:
  // A client's direction begins with the preface of RFC 9113, section 3.4.
  explicit Http2Frames(bool of_client) : preface_(of_client ? 0 : kPrefaceBytes) {}

  enum class Answer { kPass, kWait, kBroken };

  struct Progress {
    size_t bytes = 0;  // how many may be passed on
    Answer answer = Answer::kPass;
  };

  // Looks at bytes that follow those which earlier calls have let pass, and asks `may_pass` for each frame whose header
  // is whole. kWait ends the bytes that may be passed on in front of the frame, and it is asked for again the next
  // time. kBroken: `may_pass` has said so, or these bytes are not of HTTP/2. A header that is not whole is left for
  // later.
  Progress Read(std::span<const uint8_t> bytes, const std::function<Answer(const Http2Frame&)>& may_pass);

 private:
  static constexpr size_t kPrefaceBytes = 24;

  size_t preface_;        // bytes of it that were there
  uint32_t payload_ = 0;  // what is still to come of the last frame's
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_HTTP2_FRAMES_H_
