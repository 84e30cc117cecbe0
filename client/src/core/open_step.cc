#include "client/src/core/open_step.h"

#include <algorithm>
#include <iterator>

#include "kernels/base/check.h"

namespace superoffload::client {

OpenStep::OpenStep(const ModelLayout* layout)
    : layout_(layout),
      pieces_(layout->parameter_count()),
      arrived_(layout->parameter_count()),
      absent_(layout->parameter_count()),
      missing_buckets_(layout->bucket_count()) {
  for (uint32_t bucket = 0; bucket < layout->bucket_count(); ++bucket) {
    missing_.push_back(layout->elements(bucket));
  }
  for (size_t i = 0; i < layout->parameter_count(); ++i) staying_.push_back(layout->parameter(i).bucket_count);
}

Status OpenStep::Check(const GradientPiece& piece) const {
  if (Status status = layout_->CheckParameter(piece.parameter); !status.ok()) return status;
  const ParameterPlace& place = layout_->parameter(piece.parameter);
  if (piece.first > place.elements || piece.elements > place.elements - piece.first) {
    return Error(Code::kInvalidArgument, "elements ", piece.first, " and ", piece.elements, " more of ", place.name,
                 " do not exist; it has ", place.elements);
  }
  const auto& pieces = pieces_[piece.parameter];
  const auto after = pieces.lower_bound(piece.first);
  const bool overlaps = (after != pieces.end() && after->first < piece.first + piece.elements) ||
                        (after != pieces.begin() && std::prev(after)->second > piece.first);
  if (!overlaps) return {};
  return Error(
      Code::kFailedPrecondition, "the gradient of ", place.name,
      " came twice in one step: end the step after each backward pass, and add up what several passes, or several "
      "uses of a parameter, bring before it is handed over");
}

Status OpenStep::CheckAbsent(uint32_t parameter) const {
  if (Status status = layout_->CheckParameter(parameter); !status.ok()) return status;
  if (arrived_[parameter] == 0) return {};
  return Error(Code::kFailedPrecondition, layout_->parameter(parameter).name,
               absent_[parameter] ? " is absent in this step already" : " has a gradient in this step");
}

void OpenStep::Add(const Handed& handed, std::vector<uint32_t>* complete) {
  const GradientPiece& piece = handed.piece;
  handed_.push_back(handed);
  pieces_[piece.parameter].emplace(piece.first, piece.first + piece.elements);
  arrived_[piece.parameter] += piece.elements;
  if (handed.absent) absent_[piece.parameter] = true;
  layout_->ForEachPart(piece.parameter, piece.first, piece.elements, [&](uint32_t bucket, const BucketPart& part) {
    SUPEROFFLOAD_CHECK_LE(part.elements, missing_[bucket]);
    missing_[bucket] -= part.elements;
    if (missing_[bucket] > 0) return;
    --missing_buckets_;
    complete->push_back(bucket);
  });
}

void OpenStep::OnSubmitted(uint32_t bucket, std::vector<uint32_t>* left) {
  for (const BucketPart& part : layout_->parts(bucket)) {
    SUPEROFFLOAD_CHECK(staying_[part.parameter] > 0, "bucket ", bucket);
    if (--staying_[part.parameter] == 0 && !absent_[part.parameter]) left->push_back(part.parameter);
  }
}

Status OpenStep::CheckComplete(const char* call) const {
  if (IsComplete()) return {};
  size_t missing = 0, first = 0;
  for (size_t i = layout_->parameter_count(); i-- > 0;) {
    if (arrived_[i] == layout_->parameter(i).elements) continue;
    ++missing;
    first = i;
  }
  return Error(Code::kFailedPrecondition, call, " with gradients of ", missing, " of ", layout_->parameter_count(),
               " parameters missing, the first being ", layout_->parameter(first).name,
               "; hand all over, say which are absent, or abandon the step");
}

}  // namespace superoffload::client
