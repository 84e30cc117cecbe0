#include "server/host/http2_frames.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/unit/server/host/http2_bytes.h"

namespace superoffload::host {
namespace {

using Answer = Http2Frames::Answer;
using Seen = std::vector<std::tuple<uint8_t, uint8_t, uint32_t, uint32_t>>;

std::span<const uint8_t> Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

const std::string kConversation = kHttp2Preface + Http2Bytes(4, 0, 0) + Http2Bytes(1, 4, 1, "headers") +
                                  Http2Bytes(0, 1, 1, std::string(70'000, 'd')) + Http2Bytes(3, 0, 0xffffffff, "abcd");
const Seen kFrames = {{4, 0, 0, 0}, {1, 4, 1, 7}, {0, 1, 1, 70'000}, {3, 0, 0x7fffffff, 4}};

TEST(Http2FramesTest, FramesAreTheSameHoweverTheBytesAreCut) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Http2Frames frames(/*of_client=*/true);
    Seen seen;
    size_t passed = 0;
    for (size_t arrived = 0; arrived < kConversation.size();) {
      const size_t some = 1 + random() % (round % 2 == 0 ? 12 : 20'000);
      arrived = std::min(kConversation.size(), arrived + some);
      const Http2Frames::Progress progress =
          frames.Read(Bytes(kConversation).subspan(passed, arrived - passed), [&seen](const Http2Frame& frame) {
            seen.emplace_back(frame.type, frame.flags, frame.stream, frame.length);
            return Answer::kPass;
          });
      EXPECT_EQ(progress.answer, Answer::kPass);
      passed += progress.bytes;
      EXPECT_LT(arrived - passed, 9u);  // at most a header that is not whole
    }
    EXPECT_EQ(passed, kConversation.size());
    EXPECT_EQ(seen, kFrames);
  }
}

TEST(Http2FramesTest, AFrameThatWaitsIsAskedForAgain) {
  Http2Frames frames(/*of_client=*/false);
  const std::string bytes = Http2Bytes(6, 0, 0, "12345678") + Http2Bytes(1, 4, 1, "h");
  const auto no_headers = [](const Http2Frame& frame) { return frame.type == 1 ? Answer::kWait : Answer::kPass; };
  Http2Frames::Progress progress = frames.Read(Bytes(bytes), no_headers);
  EXPECT_EQ(progress.bytes, 17u);
  EXPECT_EQ(progress.answer, Answer::kWait);
  progress = frames.Read(Bytes(bytes).subspan(17), no_headers);
  EXPECT_EQ(progress.bytes, 0u);
  EXPECT_EQ(progress.answer, Answer::kWait);
  progress = frames.Read(Bytes(bytes).subspan(17), [](const Http2Frame&) { return Answer::kPass; });
  EXPECT_EQ(progress.bytes, 10u);
  EXPECT_EQ(progress.answer, Answer::kPass);
}

TEST(Http2FramesTest, AClientThatSpeaksAnotherProtocolIsBroken) {
  Http2Frames frames(/*of_client=*/true);
  const auto pass = [](const Http2Frame&) { return Answer::kPass; };
  EXPECT_EQ(frames.Read(Bytes("PRI * HT"), pass).answer, Answer::kPass);
  EXPECT_EQ(frames.Read(Bytes("TQ/2.0"), pass).answer, Answer::kBroken);
}

}  // namespace
}  // namespace superoffload::host
