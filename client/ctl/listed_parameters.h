// The parameters of a ModelDescription, added one by one in the order of registration.
#ifndef SUPEROFFLOAD_CLIENT_CTL_LISTED_PARAMETERS_H_
#define SUPEROFFLOAD_CLIENT_CTL_LISTED_PARAMETERS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::ctl {

// `model` must outlive it. Parameters have `dtype` unless told.
class ListedParameters {
 public:
  ListedParameters(v1::DataType dtype, v1::ModelDescription* model) : dtype_(dtype), model_(model) {}

  // All that follow are of this unit, and their names begin with `prefix`.
  void Begin(uint64_t unit, std::string prefix) {
    unit_ = static_cast<uint32_t>(unit);
    prefix_ = std::move(prefix);
  }
  void Add(const std::string& name, std::initializer_list<uint64_t> shape) { Add(name, shape, dtype_); }
  void Add(const std::string& name, std::initializer_list<uint64_t> shape, v1::DataType dtype) {
    v1::Parameter* const parameter = model_->add_parameters();
    parameter->set_name(absl::StrCat(prefix_, name));
    for (const uint64_t extent : shape) parameter->add_shape(extent);
    parameter->set_dtype(dtype);
    parameter->set_unit(unit_);
  }
  void Linear(const std::string& name, uint64_t outputs, uint64_t inputs, bool bias) {
    Add(name + ".weight", {outputs, inputs});
    if (bias) Add(name + ".bias", {outputs});
  }
  // GPT-2's, which keeps its matrices transposed.
  void Transposed(const std::string& name, uint64_t inputs, uint64_t outputs) {
    Add(name + ".weight", {inputs, outputs});
    Add(name + ".bias", {outputs});
  }
  void LayerNorm(const std::string& name, uint64_t width) {
    Add(name + ".weight", {width});
    Add(name + ".bias", {width});
  }

 private:
  const v1::DataType dtype_;
  v1::ModelDescription* const model_;
  uint32_t unit_ = 0;
  std::string prefix_;
};

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_LISTED_PARAMETERS_H_
