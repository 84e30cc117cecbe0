// What a connection to the control socket sends before anybody knows who it is: the frames are the same, and the same
// bytes pass, however these are cut.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "server/host/http2_frames.h"

namespace {

using superoffload::host::Http2Frame;
using superoffload::host::Http2Frames;
using Answer = Http2Frames::Answer;
using Frames = std::vector<std::tuple<uint32_t, uint8_t, uint8_t, uint32_t>>;

// Types from 0x80 on are broken; the first offer of an odd type waits.
std::pair<Frames, size_t> Read(std::span<const uint8_t> bytes, bool of_client, size_t step) {
  Http2Frames frames(of_client);
  Frames seen;
  size_t passed = 0;
  bool waited = false;
  for (size_t arrived = std::min(step, bytes.size());;) {
    const Http2Frames::Progress progress =
        frames.Read(bytes.subspan(passed, arrived - passed), [&](const Http2Frame& frame) {
          if (frame.type >= 0x80) return Answer::kBroken;
          waited = !waited && frame.type % 2 == 1;
          if (waited) return Answer::kWait;
          seen.emplace_back(frame.length, frame.type, frame.flags, frame.stream);
          return Answer::kPass;
        });
    if (progress.bytes > arrived - passed) std::abort();
    passed += progress.bytes;
    if (progress.answer == Answer::kBroken) break;
    if (progress.answer == Answer::kWait) continue;
    if (arrived == bytes.size()) break;
    arrived = std::min(arrived + step, bytes.size());
  }
  return {seen, passed};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const uint8_t> bytes(data + 1, size - 1);
  const bool of_client = (data[0] & 1) != 0;
  const std::pair<Frames, size_t> whole = Read(bytes, of_client, std::max<size_t>(bytes.size(), 1));
  if (Read(bytes, of_client, 1) != whole || Read(bytes, of_client, 2 + data[0] / 2) != whole) std::abort();
  return 0;
}
