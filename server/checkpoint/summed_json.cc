#include "server/checkpoint/summed_json.h"

#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "server/memory/crc32.h"

namespace superoffload::checkpoint {
namespace {

constexpr std::string_view kEnd = "\n}";

// What follows the bytes that are summed up.
std::string Tail(std::string_view body) {
  return absl::StrFormat(",\n \"%s\": \"%08x\"\n}\n", kSumKey, memory::Crc32(body.data(), body.size()));
}

}  // namespace

std::string SumUp(std::string_view text) {
  SUPEROFFLOAD_CHECK(text.ends_with(kEnd), text.size());
  const std::string_view body = text.substr(0, text.size() - kEnd.size());
  return std::string(body) + Tail(body);
}

bool IsSummedUp(std::string_view text) {
  static const size_t tail = Tail("").size();
  if (text.size() < tail) return false;
  const std::string_view body = text.substr(0, text.size() - tail);
  return text.substr(body.size()) == Tail(body);
}

}  // namespace superoffload::checkpoint
