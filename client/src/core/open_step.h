// What has been handed over in the open step, and what is missing: all that a daemon's successor must be told.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_OPEN_STEP_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_OPEN_STEP_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "client/src/core/gradient_mover.h"
#include "client/src/core/model_layout.h"
#include "client/src/status.h"

namespace superoffload::client {

// How a step ends; superoffload.h says what each is.
struct StepEnd {
  enum class Kind { kEnd, kPrepare, kEndPrepared, kAbandon };

  Kind kind = Kind::kEnd;
  double gradient_scale = 1;
  double max_grad_norm = 0;
  double total_sum_of_squares = 0;
  std::vector<StreamNumber> streams;  // that read the parameters before it
};

class OpenStep {
 public:
  struct Handed {
    GradientPiece piece;
    GradientSource source;
    bool absent = false;
  };

  // `layout` outlives it.
  explicit OpenStep(const ModelLayout* layout);

  // INVALID_ARGUMENT: there is no such piece. FAILED_PRECONDITION: some of it has come.
  Status Check(const GradientPiece& piece) const;
  // FAILED_PRECONDITION: the parameter has a gradient, or was absent before.
  Status CheckAbsent(uint32_t parameter) const;

  // Notes something that was checked, and appends the buckets that are complete with it.
  void Add(const Handed& handed, std::vector<uint32_t>* complete);

  // The bucket has been submitted: appends the parameters of which all buckets have been, but absent ones.
  void OnSubmitted(uint32_t bucket, std::vector<uint32_t>* left);

  bool IsComplete() const { return missing_buckets_ == 0; }
  // FAILED_PRECONDITION, in the words of `call`: gradients are missing.
  Status CheckComplete(const char* call) const;

  std::span<const Handed> handed() const { return handed_; }
  std::span<const uint64_t> arrived() const { return arrived_; }  // elements of each parameter
  bool is_absent(uint32_t parameter) const { return absent_[parameter]; }

  // Passes before the last have left what nobody else knows.
  bool has_sums = false;
  // BEGIN_STEP has been submitted, with this scale.
  std::optional<double> begun;
  // How it has been asked to end; a prepared step is ended later.
  std::optional<StepEnd> end;
  // Other ranks may have committed it.
  bool undecided() const {
    return end && (end->kind == StepEnd::Kind::kPrepare || end->kind == StepEnd::Kind::kEndPrepared);
  }
  bool ended() const { return end && end->kind != StepEnd::Kind::kPrepare; }

 private:
  const ModelLayout* layout_;
  std::vector<Handed> handed_;
  std::vector<std::map<uint64_t, uint64_t>> pieces_;  // of each parameter: first -> last + 1
  std::vector<uint64_t> arrived_;
  std::vector<bool> absent_;
  std::vector<uint64_t> missing_;  // elements of each bucket
  size_t missing_buckets_ = 0;
  std::vector<uint32_t> staying_;  // buckets of each parameter that have not been submitted
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_OPEN_STEP_H_
