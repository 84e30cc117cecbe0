#include "server/host/http2_frames.h"

#include <algorithm>
#include <string_view>

namespace superoffload::host {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kHeaderBytes = 9;

Http2Frame Parse(std::span<const uint8_t> header) {
  const auto big_endian = [header](size_t first, size_t last) {
    uint32_t number = 0;
    for (size_t i = first; i < last; ++i) number = number << 8 | header[i];
    return number;
  };
  return {.length = big_endian(0, 3),
          .type = header[3],
          .flags = header[4],
          .stream = big_endian(5, kHeaderBytes) & 0x7fffffff};  // the first bit is reserved
}

}  // namespace

Http2Frames::Progress Http2Frames::Read(std::span<const uint8_t> bytes,
                                        const std::function<Answer(const Http2Frame&)>& may_pass) {
  static_assert(kPreface.size() == kPrefaceBytes);
  size_t passed = 0;
  for (; preface_ < kPrefaceBytes && passed < bytes.size(); ++preface_, ++passed) {
    if (bytes[passed] != static_cast<uint8_t>(kPreface[preface_])) return {passed, Answer::kBroken};
  }
  while (passed < bytes.size()) {
    const auto payload = static_cast<uint32_t>(std::min<size_t>(payload_, bytes.size() - passed));
    payload_ -= payload;
    passed += payload;
    if (bytes.size() - passed < kHeaderBytes) break;
    const Http2Frame frame = Parse(bytes.subspan(passed, kHeaderBytes));
    if (const Answer answer = may_pass(frame); answer != Answer::kPass) return {passed, answer};
    payload_ = frame.length;
    passed += kHeaderBytes;
  }
  return {passed, Answer::kPass};
}

}  // namespace superoffload::host
