// The models that the planner knows by name.
//
// Those of users have the names and shapes that transformers gives their published configurations; a test holds them to
// it. gpt2-1b to gpt2-200b are the shapes of the SuperOffload paper's artifact, GPT-2 style with 32 heads; vocabulary
// (50257) and learned positions (2048) are not stated there and are GPT-2's and the paper's sequence.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_CATALOGUE_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_CATALOGUE_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/simulator/architecture.h"

namespace superoffload::simulator {

// NOT_FOUND, with the names there are.
absl::StatusOr<Model> FindModel(std::string_view name, kernels::DType dtype = kernels::DType::kBFloat16,
                                kernels::DType gradient_dtype = kernels::DType::kBFloat16);

std::vector<std::string> ModelNames();

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_CATALOGUE_H_
