#include "kernels/algorithm.h"

namespace superoffload::kernels {

#define X(name) extern const Algorithm name;
#include "kernels/algorithms.inc"
#undef X

namespace {

std::vector<const Algorithm*>& All() {
  static std::vector<const Algorithm*> all = {
#define X(name) &name,
#include "kernels/algorithms.inc"
#undef X
  };
  return all;
}

}  // namespace

std::span<const Algorithm* const> Algorithms() { return All(); }

void AddAlgorithm(const Algorithm& algorithm) { All().push_back(&algorithm); }

const Algorithm* FindAlgorithm(std::string_view name) {
  for (const Algorithm* algorithm : All()) {
    if (algorithm->name == name) return algorithm;
  }
  return nullptr;
}

}  // namespace superoffload::kernels
