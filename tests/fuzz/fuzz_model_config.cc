// A config.json: anything is either refused with a sentence about it or a model of parameters that the planner can
// take.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "client/ctl/config_fields.h"
#include "client/ctl/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using superoffload::ctl::kMostConfigLayers;
  const absl::StatusOr<superoffload::v1::ModelDescription> model = superoffload::ctl::ParseModelConfig(
      std::string(reinterpret_cast<const char*>(data), size), "fuzz", "", superoffload::v1::DATA_TYPE_UNSPECIFIED);
  if (!model.ok()) {
    if (!absl::IsInvalidArgument(model.status()) || model.status().message().find("fuzz") == std::string::npos) {
      std::abort();
    }
    return 0;
  }
  const superoffload::v1::Architecture& a = model->architecture();
  if (a.layers() == 0 || a.layers() > kMostConfigLayers || a.windowed_layers() > a.layers()) std::abort();
  uint32_t unit = 0;
  for (const superoffload::v1::Parameter& parameter : model->parameters()) {
    if (parameter.name().empty() || parameter.unit() < unit || parameter.unit() > a.layers() + 1) std::abort();
    unit = parameter.unit();
    for (const uint64_t extent : parameter.shape()) {
      if (extent == 0) std::abort();
    }
  }
  if (unit != a.layers() + 1) std::abort();
  return 0;
}
