// A directory with a checkpoint, or what somebody passes off as one, made of a fuzzer's bytes: files one after the
// other, each with its name's number in one byte and its length in the next two. An index gets the sum that it should
// have, since whoever makes one can sum it up.
#ifndef SUPEROFFLOAD_TESTS_FUZZ_CHECKPOINT_DIRECTORY_H_
#define SUPEROFFLOAD_TESTS_FUZZ_CHECKPOINT_DIRECTORY_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "server/checkpoint/summed_json.h"

namespace superoffload::fuzz {

class CheckpointDirectory {
 public:
  CheckpointDirectory() : root_(std::filesystem::temp_directory_path() / "so-fuzz-checkpoint-XXXXXX") {
    std::string name = root_.string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    root_ = name;
  }
  ~CheckpointDirectory() { std::filesystem::remove_all(root_); }

  // Makes it anew.
  void Fill(const uint8_t* data, size_t size) const {
    static constexpr const char* kNames[] = {"model.safetensors.index.json",
                                             "a.safetensors",
                                             "b.safetensors",
                                             "run.index.json",
                                             "rank-00000-of-00002/model.safetensors.index.json",
                                             "rank-00001-of-00002/model.safetensors.index.json",
                                             "rank-00000-of-00002/a.safetensors",
                                             "rank-00001-of-00002/a.safetensors"};
    for (const char* const kept : {"checkpoint", "model", ".model.partial", ".checkpoint.ranks"}) {
      std::filesystem::remove_all(root_ / kept);
    }
    std::filesystem::create_directories(root_ / "checkpoint");
    while (size >= 3) {
      const std::filesystem::path path = root_ / "checkpoint" / kNames[data[0] % std::size(kNames)];
      const size_t length = std::min<size_t>(data[1] | data[2] << 8, size - 3);
      std::string text(reinterpret_cast<const char*>(data) + 3, length);
      const std::string tail = std::string(",\n \"") + checkpoint::kSumKey;
      if (path.extension() == ".json" && text.find(tail) != std::string::npos) {
        text = checkpoint::SumUp(text.substr(0, text.find(tail)) + "\n}");
      }
      std::filesystem::create_directories(path.parent_path());
      std::ofstream(path, std::ios::binary) << text;
      data += 3 + length;
      size -= 3 + length;
    }
  }

  std::string checkpoint() const { return root_ / "checkpoint"; }
  std::string model() const { return root_ / "model"; }  // is not there

 private:
  std::filesystem::path root_;
};

}  // namespace superoffload::fuzz

#endif  // SUPEROFFLOAD_TESTS_FUZZ_CHECKPOINT_DIRECTORY_H_
