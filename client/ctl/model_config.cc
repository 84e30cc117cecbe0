#include "client/ctl/model_config.h"

#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/ctl/config_fields.h"
#include "client/ctl/model_families.h"

namespace superoffload::ctl {
namespace {

absl::Status Wrong(const std::string& sentence) { return absl::InvalidArgumentError(sentence); }

v1::DataType DTypeOf(ConfigFields& config) {
  for (const char* const field : {"dtype", "torch_dtype"}) {
    if (!config.Has(field)) continue;
    const std::string text = config.Text(field);
    v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
    const std::string word = absl::AsciiStrToUpper(absl::StripPrefix(text, "torch."));
    if (!v1::DataType_Parse(absl::StrCat("DATA_TYPE_", word), &dtype) || dtype == v1::DATA_TYPE_UNSPECIFIED) {
      config.Fail(absl::StrCat(field, " is \"", text.substr(0, 32),
                               "\" but must be float32, bfloat16 or float16; --dtype says another"));
    }
    return dtype;
  }
  return v1::DATA_TYPE_BFLOAT16;
}

// A directory's last component; "" of one that has none, as ".".
std::string NameOf(const std::filesystem::path& file) {
  const std::string name = file.parent_path().filename();
  return name == "." ? "" : name;
}

}  // namespace

absl::StatusOr<v1::ModelDescription> ParseModelConfig(const std::string& json, const std::string& path,
                                                      const std::string& name, v1::DataType dtype) {
  if (json.size() > kMostConfigBytes) {
    return Wrong(absl::StrCat(path, " has more than ", kMostConfigBytes, " bytes, the most of a configuration"));
  }
  absl::StatusOr<ConfigFields> config = ConfigFields::Parse(json, path);
  if (!config.ok()) return config.status();
  const std::string family = config->Text("model_type");
  if (!config->status().ok()) return config->status();
  if (family.empty()) return Wrong(absl::StrCat(path, " does not say model_type: it is no model's configuration"));
  if (dtype == v1::DATA_TYPE_UNSPECIFIED) dtype = DTypeOf(*config);
  v1::ModelDescription model;
  model.set_name(name.empty() ? family : name);
  if (!DescribeFamily(family, *config, dtype, &model)) {
    return Wrong(
        absl::StrCat(path, " is of the architecture \"", family.substr(0, 64),
                     "\", which superoffloadctl does not know; `superoffload plan` of the Python package takes it "
                     "where transformers does. superoffloadctl knows ",
                     absl::StrJoin(FamilyNames(), ", ")));
  }
  if (!config->status().ok()) return config->status();
  return model;
}

absl::StatusOr<v1::ModelDescription> ReadModelConfig(const std::string& path, v1::DataType dtype) {
  std::filesystem::path file = path;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) file = file / "config.json";
  // A device or a pipe may have no end.
  if (!std::filesystem::is_regular_file(file, error)) {
    return Wrong(
        absl::StrCat("there is no file ", file.string(), "; give the config.json of a model, or its directory"));
  }
  std::ifstream stream(file, std::ios::binary);
  std::string json(kMostConfigBytes + 1, '\0');
  stream.read(json.data(), static_cast<std::streamsize>(json.size()));
  if (!stream.is_open() || stream.bad()) return Wrong(absl::StrCat("cannot read ", file.string()));
  json.resize(static_cast<size_t>(stream.gcount()));
  return ParseModelConfig(json, file.string(), NameOf(file), dtype);
}

}  // namespace superoffload::ctl
