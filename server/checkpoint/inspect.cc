#include "server/checkpoint/inspect.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/saved_tensors.h"
#include "superoffload/v1/printable.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// The parts that lie in a directory that nobody has sealed.
std::vector<Part> PartsIn(const std::string& growing) {
  std::error_code error;
  std::vector<Part> parts;
  for (const fs::directory_entry& entry : fs::directory_iterator(growing, error)) {
    absl::StatusOr<Index> index = ReadIndex(entry.path());
    if (index.ok()) parts.push_back({entry.path(), *std::move(index)});
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.directory < b.directory; });
  return parts;
}

class Inspector {
 public:
  explicit Inspector(std::string directory) : directory_(std::move(directory)) {}

  absl::Status Open() {
    absl::StatusOr<Checkpoint> opened = OpenCheckpoint(directory_);
    if (opened.ok()) {
      checkpoint_ = *std::move(opened);
      return absl::OkStatus();
    }
    checkpoint_.parts = PartsIn(directory_);
    if (checkpoint_.parts.empty()) checkpoint_.parts = PartsIn(GrowingRun(directory_));
    problems_.push_back(absl::IsNotFound(opened.status())
                            ? "not all ranks have written their parts, or nobody has sealed it"
                            : std::string(opened.status().message()));
    return checkpoint_.parts.empty() ? opened.status() : absl::OkStatus();
  }

  void Look(bool checksums) {
    for (const Part& part : checkpoint_.parts) {
      if (absl::Status status = saved_.AddPart(part); !status.ok()) problems_.emplace_back(status.message());
    }
    std::vector<SavedTensors::Tensor> tensors;
    for (const auto& [name, slices] : saved_.slices()) {
      const SavedTensors::Slice& any = slices.front();
      absl::StatusOr<SavedTensors::Tensor> tensor = saved_.Find(name, any.dtype, Box::Whole(any.box.global_shape));
      if (!tensor.ok() && absl::IsFailedPrecondition(tensor.status()) && IsPartOfRun()) {
        continue;  // others have the rest
      }
      if (tensor.ok()) {
        tensors.push_back(*std::move(tensor));
      } else {
        problems_.emplace_back(tensor.status().message());
      }
    }
    if (!checksums) return;
    if (absl::Status status = SavedTensors::Verify(tensors); !status.ok()) problems_.emplace_back(status.message());
  }

  Inspection Result() const {
    const Json json = Describe();
    return {problems_.empty(), Text(json), json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n"};
  }

 private:
  bool IsPartOfRun() const { return !checkpoint_.run && checkpoint_.parts.front().index.ranks > 1; }

  Json Describe() const {
    const Index& first = checkpoint_.parts.front().index;
    Json json = {{"path", directory_},
                 {"kind", checkpoint_.run || checkpoint_.parts.size() > 1 || !problems_.empty() ? "run"
                          : IsPartOfRun()                                                       ? "rank"
                                                                                                : "optimizer"},
                 {"whole", problems_.empty()},
                 {"problems", problems_},
                 {"run_name", first.run_name},
                 {"ranks", first.ranks},
                 {"lineage", first.lineage},
                 {"committed_steps", first.committed_steps},
                 {"algorithm", first.algorithm},
                 {"groups", first.groups}};
    uint64_t bytes = 0;
    json["parts"] = Json::array();
    for (const Part& part : checkpoint_.parts) {
      json["parts"].push_back({{"path", part.directory},
                               {"optimizer", part.index.optimizer},
                               {"rank", part.index.rank},
                               {"bytes", part.index.total_bytes}});
      bytes += part.index.total_bytes;
    }
    json["bytes"] = bytes;
    std::map<std::string, std::set<std::string>> arrays;  // dtypes: parameters may differ in theirs
    std::map<std::string, Json> parameters;
    for (const auto& [name, slices] : saved_.slices()) {
      const size_t dot = name.find('.');
      if (dot == std::string::npos) continue;
      arrays[name.substr(0, dot)].insert(slices.front().dtype);
      parameters.try_emplace(name.substr(dot + 1), Json{{"name", name.substr(dot + 1)},
                                                        {"shape", slices.front().box.global_shape},
                                                        {"steps", slices.front().steps},
                                                        {"shards", slices.size()}});
    }
    json["arrays"] = Json::array();
    for (const auto& [name, dtypes] : arrays) {
      json["arrays"].push_back({{"name", name}, {"dtype", absl::StrJoin(dtypes, ", ")}});
    }
    json["parameters"] = Json::array();
    for (auto& [name, parameter] : parameters) json["parameters"].push_back(parameter);
    return json;
  }

  std::string Text(const Json& json) const {
    const Index& first = checkpoint_.parts.front().index;
    std::string text;
    const auto add = [&text](const auto&... words) { absl::StrAppend(&text, Printable(absl::StrCat(words...)), "\n"); };
    add(json["kind"].get<std::string>(), " ", first.run_name.empty() ? first.optimizer : first.run_name, ", step ",
        first.committed_steps, ", ", first.algorithm, ", ", checkpoint_.parts.size(), " of ",
        json["kind"] == "run" ? first.ranks : 1, " parts, ", json["bytes"].get<uint64_t>(), " bytes, ",
        problems_.empty() ? "whole" : "NOT WHOLE");
    for (const std::string& problem : problems_) add("  ", problem);
    for (const Json& part : json["parts"]) {
      add("  rank ", part["rank"].get<uint32_t>(), "  ", part["optimizer"].get<std::string>(), "  ",
          part["bytes"].get<uint64_t>(), " bytes  ", part["path"].get<std::string>());
    }
    for (const Json& array : json["arrays"]) {
      add("  array ", array["name"].get<std::string>(), "  ", array["dtype"].get<std::string>());
    }
    for (const Json& parameter : json["parameters"]) {
      add("  ", parameter["name"].get<std::string>(), "  [",
          absl::StrJoin(parameter["shape"].get<std::vector<uint64_t>>(), ", "), "]  ",
          parameter["steps"].get<uint64_t>(), " steps  ", parameter["shards"].get<size_t>(), " shards");
    }
    return text;
  }

  const std::string directory_;
  Checkpoint checkpoint_;
  SavedTensors saved_;
  std::vector<std::string> problems_;
};

}  // namespace

absl::StatusOr<Inspection> InspectCheckpoint(const std::string& directory, bool checksums) {
  Inspector inspector(directory);
  if (absl::Status status = inspector.Open(); !status.ok()) return status;
  inspector.Look(checksums);
  return inspector.Result();
}

}  // namespace superoffload::checkpoint
