// The whole of inspect over a directory that anybody may have made: it says what is there, in lines that a terminal
// takes and JSON that is JSON, or why it cannot; what it calls whole can be put together.
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "server/checkpoint/inspect.h"
#include "tests/fuzz/checkpoint_directory.h"

using namespace superoffload;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::CheckpointDirectory directory;
  directory.Fill(data, size);
  bool whole = false;
  for (const bool checksums : {false, true}) {
    const absl::StatusOr<checkpoint::Inspection> found =
        checkpoint::InspectCheckpoint(directory.checkpoint(), checksums);
    if (!found.ok()) {
      if (found.status().message().empty()) std::abort();
      return 0;
    }
    if (checksums && found->whole && !whole) std::abort();  // looking closer finds more
    whole = found->whole;
    const nlohmann::json json = nlohmann::json::parse(found->json, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || json["whole"] != found->whole || json["problems"].empty() != found->whole) std::abort();
    for (const char c : found->text) {
      if (std::iscntrl(static_cast<unsigned char>(c)) && c != '\n') std::abort();
    }
  }
  return 0;
}
