// What handlers of all platforms do with their arguments, which superoffload/jax/ffi.py gives.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_CALL_ARGUMENTS_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_CALL_ARGUMENTS_H_

#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "client/src/core/trainer.h"
#include "client/src/core/trainers.h"
#include "client/src/xla/xla_handlers.h"
#include "xla/ffi/api/ffi.h"

namespace superoffload::client {

using CallNumbers = xla::ffi::Span<const int64_t>;

// Calls `call(trainer)` with the trainer of this number.
template <typename Call>
xla::ffi::Error Handled(int64_t number, Call call) {
  Status status;
  try {
    std::shared_ptr<Trainer> trainer;
    status = FindTrainer(number, &trainer);
    if (status.ok()) status = call(*trainer);
  } catch (const std::bad_alloc&) {
    status = Error(Code::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    status = Error(Code::kInternal, error.what());
  }
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(static_cast<xla::ffi::ErrorCode>(status.code), std::move(status.message));
}

// The gradients of `parameters`, which are operands from `first` on. `index`: of the slices of the parameters that they
// are; negative: they are whole.
Status PiecesOf(const Trainer& trainer, CallNumbers parameters, int32_t index, const xla::ffi::RemainingArgs& operands,
                size_t first, std::vector<GradientPiece>* pieces);

// Of a "hand_over". Operands: the number of the slice, what passes through, gradients of `parameters`.
struct HandOverCall {
  CallNumbers parameters;
  xla::ffi::RemainingArgs operands;
  size_t passing;

  // Where the number of the slice is, on the platform.
  Status Index(const int32_t** index) const;
  Status Pieces(const Trainer& trainer, int32_t index, std::vector<GradientPiece>* pieces) const;
};

// Calls `copy(to, from, bytes)` for what passes through and has not been left where it was.
template <typename Copy>
Status PassThrough(const HandOverCall& call, xla::ffi::RemainingRets results, Copy copy) {
  for (size_t i = 0; i < call.passing; ++i) {
    const auto from = call.operands.get<xla::ffi::AnyBuffer>(1 + i);
    auto to = results.get<xla::ffi::AnyBuffer>(i);
    if (!from.has_value() || !to.has_value()) return Error(Code::kInvalidArgument, "wrong operands");
    if ((*to)->untyped_data() == from->untyped_data()) continue;
    if (Status status = copy((*to)->untyped_data(), from->untyped_data(), from->size_bytes()); !status.ok()) {
      return status;
    }
  }
  return {};
}

// A daemon that is gone is no error here: the gradients are noted, and whoever ends the step is told.
inline Status HandOverFromXla(Trainer& trainer, std::span<const GradientPiece> pieces, const GradientSource& source) {
  Status status =
      trainer.HandOver({.pieces = pieces, .absent = {}, .source = source, .begins_with = {}, .digests = {}});
  return status.code == Code::kUnavailable ? Status{} : status;
}

// The places of `parameters` among the results, which are theirs, in order; `to`: of all, null for the rest.
// INVALID_ARGUMENT: they have other sizes.
Status ParameterResults(const Trainer& trainer, std::span<const int64_t> parameters, xla::ffi::RemainingRets results,
                        std::vector<void*>* to);

// A handler for the GPU by name; null: there is none.
void* FindCudaHandler(const char* name);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_CALL_ARGUMENTS_H_
