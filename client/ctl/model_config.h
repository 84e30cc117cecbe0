// A Hugging Face config.json as a ModelDescription, without Python: for `superoffloadctl plan --model=DIRECTORY`.
//
// It names each parameter as transformers' class of the model does, in the order of named_parameters(), with its shape
// and its block. So it equals what `superoffload plan`, which makes the model on torch's meta device, sends; a test
// compares the two. It knows a dozen families (model_families.h). It takes no default of a size from transformers: what
// a configuration does not state is asked for.
#ifndef SUPEROFFLOAD_CLIENT_CTL_MODEL_CONFIG_H_
#define SUPEROFFLOAD_CLIENT_CTL_MODEL_CONFIG_H_

#include <string>

#include "absl/status/statusor.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::ctl {

// A config.json is a few KiB, and 100 with per-layer lists.
inline constexpr size_t kMostConfigBytes = size_t{1} << 20;

// `path` is the file or its directory. `dtype`: of the parameters; unspecified: the configuration's, else bfloat16.
// INVALID_ARGUMENT: a sentence that names the file and what is wrong with it.
absl::StatusOr<v1::ModelDescription> ReadModelConfig(const std::string& path, v1::DataType dtype);

// The same of a file's text. `name`: of the model; empty: its model_type. `path` names the file in messages.
absl::StatusOr<v1::ModelDescription> ParseModelConfig(const std::string& json, const std::string& path,
                                                      const std::string& name, v1::DataType dtype);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_MODEL_CONFIG_H_
