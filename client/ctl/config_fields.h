// The fields of a Hugging Face config.json, which may come from anybody: each is read with its type and range.
#ifndef SUPEROFFLOAD_CLIENT_CTL_CONFIG_FIELDS_H_
#define SUPEROFFLOAD_CLIENT_CTL_CONFIG_FIELDS_H_

#include <google/protobuf/struct.pb.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace superoffload::ctl {

// Far beyond any model; products of three stay far below 2^64. The planner has the same.
inline constexpr uint64_t kMostOfConfig = uint64_t{1} << 20;
inline constexpr uint64_t kMostConfigLayers = uint64_t{1} << 14;

// The first field that is wrong makes status() INVALID_ARGUMENT; what is read of a wrong field is in range all the
// same.
class ConfigFields {
 public:
  // INVALID_ARGUMENT: no JSON object, or one that is nested too deeply. `path` names the file in messages.
  static absl::StatusOr<ConfigFields> Parse(const std::string& json, std::string path);

  const absl::Status& status() const { return status_; }
  void Fail(const std::string& sentence);

  // The field has a value; a null is none.
  bool Has(const std::string& name) const { return Find(name) != nullptr; }
  // It has a value or is null.
  bool States(const std::string& name) const;

  // A whole number from 1 to `most`. It is wrong where none of the names, which mean the same, is stated.
  uint64_t Stated(std::initializer_list<std::string> names, uint64_t most = kMostOfConfig);
  // `otherwise` where it has no value.
  uint64_t NumberOr(const std::string& name, uint64_t otherwise, uint64_t most = kMostOfConfig);
  // The same from 0.
  uint64_t CountOr(const std::string& name, uint64_t otherwise);
  bool FlagOr(const std::string& name, bool otherwise);
  // Empty where it has no value.
  std::string Text(const std::string& name);
  std::vector<uint64_t> Numbers(const std::string& name);
  // nullopt where it has no value.
  std::optional<std::vector<std::string>> Texts(const std::string& name);

 private:
  ConfigFields(google::protobuf::Struct fields, std::string path);

  const google::protobuf::Value* Find(const std::string& name) const;
  uint64_t Number(const std::string& name, const google::protobuf::Value& value, uint64_t least, uint64_t most);
  const google::protobuf::ListValue* List(const std::string& name);

  google::protobuf::Struct fields_;
  std::string path_;
  absl::Status status_;
};

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_CONFIG_FIELDS_H_
