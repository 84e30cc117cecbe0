// Trainers of superoffload.h: numbers in, status codes out.
#include <algorithm>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "client/src/c_border.h"
#include "client/src/core/trainer.h"
#include "client/src/core/trainers.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {
namespace {

Status NullArgument() { return Error(Code::kInvalidArgument, "NULL argument"); }

Status ToPieces(std::span<const superoffload_piece> given, bool may_be_null, std::vector<GradientPiece>* pieces) {
  for (const superoffload_piece& piece : given) {
    kernels::DType dtype{};
    if (!ToDType(piece.dtype, &dtype)) return Error(Code::kInvalidArgument, "unknown dtype ", piece.dtype);
    if (piece.data == 0 && piece.elements > 0 && !may_be_null) return NullArgument();
    pieces->push_back({piece.parameter, piece.first, piece.elements, reinterpret_cast<const void*>(piece.data), dtype});
  }
  return {};
}

Status ToSource(const superoffload_gradients& given, GradientSource* source) {
  using Stays = GradientSource::Stays;
  constexpr Stays kByNumber[] = {Stays::kNot, Stays::kUntilPacked, Stays::kUntilOver};
  if (given.stays >= std::size(kByNumber)) return Error(Code::kInvalidArgument, "unknown stays ", given.stays);
  source->stays = kByNumber[given.stays];
  if (given.on_gpu != 0) source->stream = given.stream;
  return {};
}

Status ToEnd(const superoffload_step_end& given, StepEnd* end) {
  using Kind = StepEnd::Kind;
  constexpr Kind kByNumber[] = {Kind::kEnd, Kind::kPrepare, Kind::kEndPrepared, Kind::kAbandon};
  if (given.kind >= std::size(kByNumber)) return Error(Code::kInvalidArgument, "unknown end ", given.kind);
  if (given.streams == nullptr && given.stream_count > 0) return NullArgument();
  *end = {kByNumber[given.kind], given.gradient_scale, given.max_grad_norm, given.total_sum_of_squares, {}};
  end->streams.assign(given.streams, given.streams + given.stream_count);
  return {};
}

Status Wait(Trainer& trainer, const superoffload_awaited& awaited, const Deadline& deadline,
            superoffload_answer* answer) {
  switch (awaited.kind) {
    case SUPEROFFLOAD_AWAIT_NORM: {
      StepProgress::Norm norm;
      Status status = trainer.WaitNorm(deadline, &norm);
      if (status.ok()) *answer = {.norm = norm.norm, .sum_of_squares = norm.sum_of_squares, .verdict = {}};
      return status;
    }
    case SUPEROFFLOAD_AWAIT_PREPARED:
      return trainer.WaitPrepared(deadline, &answer->sum_of_squares);
    case SUPEROFFLOAD_AWAIT_VERDICT:
      return trainer.WaitVerdict(deadline, &answer->verdict);
    case SUPEROFFLOAD_AWAIT_STEP:
      return trainer.WaitStep(deadline, &answer->verdict);
    case SUPEROFFLOAD_AWAIT_BUCKET:
      return trainer.WaitBucket(awaited.bucket, deadline);
    case SUPEROFFLOAD_AWAIT_BUCKET_ON_GPU:
      return trainer.WaitBucketOnGpu(awaited.bucket, awaited.stream, deadline);
    default:
      return Error(Code::kInvalidArgument, "nobody can wait for ", awaited.kind);
  }
}

}  // namespace
}  // namespace superoffload::client

using superoffload::client::Code;
using superoffload::client::DeadlineAfter;
using superoffload::client::GradientPiece;
using superoffload::client::Gradients;
using superoffload::client::Guarded;
using superoffload::client::NullArgument;
using superoffload::client::Status;
using superoffload::client::StepEnd;
using superoffload::client::Trainer;
using superoffload::client::WithTrainer;

int superoffload_open_trainer(const superoffload_trainer_options* options, int64_t* trainer) {
  return Guarded([&]() -> Status {
    if (options == nullptr || trainer == nullptr) return NullArgument();
    std::unique_ptr<Trainer> created;
    if (Status status = Trainer::Create(*options, &created); !status.ok()) return status;
    *trainer = superoffload::client::AddTrainer(std::move(created));
    return {};
  });
}

void superoffload_close_trainer(int64_t trainer) { superoffload::client::RemoveTrainer(trainer); }

int superoffload_use_attachment(int64_t trainer, superoffload_attachment* attachment, uint32_t next_slot,
                                uint64_t committed_steps, uint32_t resumes, uint32_t* resumed) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    Trainer::Resumed became = Trainer::Resumed::kNothing;
    Status status;
    if (attachment == nullptr) {
      impl.Leave();
    } else {
      status = impl.Use(attachment->impl.get(), next_slot, committed_steps, resumes != 0, &became);
    }
    if (resumed != nullptr) *resumed = static_cast<uint32_t>(became);
    return status;
  });
}

int superoffload_set_scalars(int64_t trainer, uint32_t group, const double* scalars, uint32_t count) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (scalars == nullptr) return NullArgument();
    return impl.SetScalars(group, {scalars, count});
  });
}

int superoffload_hand_over(int64_t trainer, superoffload_gradients* gradients) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (gradients == nullptr || (gradients->pieces == nullptr && gradients->piece_count > 0) ||
        (gradients->absent == nullptr && gradients->absent_count > 0)) {
      return NullArgument();
    }
    const uint32_t count = gradients->piece_count;
    std::vector<GradientPiece> pieces;
    if (Status status = superoffload::client::ToPieces({gradients->pieces, count}, gradients->on_gpu != 0, &pieces);
        !status.ok()) {
      return status;
    }
    Gradients given{.pieces = pieces,
                    .absent = {gradients->absent, gradients->absent_count},
                    .source = {},
                    .begins_with = {},
                    .digests = {gradients->digests, gradients->digests == nullptr ? 0 : count}};
    if (Status status = superoffload::client::ToSource(*gradients, &given.source); !status.ok()) return status;
    if (gradients->gradient_scale != 0) given.begins_with = gradients->gradient_scale;
    std::vector<uint32_t> left;
    if (gradients->more_follow > 1 || (gradients->more_follow == 1 && (given.begins_with || !given.absent.empty()))) {
      return Error(Code::kInvalidArgument,
                   "gradients of a pass that more follow come alone, and more_follow is 0 or 1");
    }
    Status status = gradients->more_follow == 1 ? impl.AddUp(given, &left)
                                                : impl.HandOver(given, gradients->left == nullptr ? nullptr : &left);
    if (gradients->left != nullptr) std::ranges::copy(left, gradients->left);
    gradients->left_count = static_cast<uint32_t>(left.size());
    return status;
  });
}

int superoffload_find_edited(int64_t trainer, const superoffload_piece* pieces, uint32_t count, uint32_t* index) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (index == nullptr || (pieces == nullptr && count > 0)) return NullArgument();
    std::vector<GradientPiece> all;
    if (Status status = superoffload::client::ToPieces({pieces, count}, /*may_be_null=*/false, &all); !status.ok()) {
      return status;
    }
    size_t found = count;
    Status status = impl.FindEdited(all, &found);
    *index = static_cast<uint32_t>(found);
    return status;
  });
}

int superoffload_end(int64_t trainer, const superoffload_step_end* end) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (end == nullptr) return NullArgument();
    if (end->kind == SUPEROFFLOAD_END_MEASURE) return impl.MeasureNorm(end->gradient_scale);
    StepEnd how;
    if (Status status = superoffload::client::ToEnd(*end, &how); !status.ok()) return status;
    return impl.End(how);
  });
}

int superoffload_wait(int64_t trainer, const superoffload_awaited* awaited, int64_t timeout_milliseconds,
                      superoffload_answer* answer) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (awaited == nullptr || (answer == nullptr && awaited->kind < SUPEROFFLOAD_AWAIT_BUCKET)) return NullArgument();
    return superoffload::client::Wait(impl, *awaited, DeadlineAfter(timeout_milliseconds), answer);
  });
}

int superoffload_receive(int64_t trainer, const superoffload_range* ranges, int64_t timeout_milliseconds,
                         uint64_t* digests, uint8_t* received) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (ranges == nullptr || digests == nullptr || received == nullptr) return NullArgument();
    const size_t count = impl.layout().parameter_count();
    return impl.Receive({ranges, count}, {digests, count}, {received, count}, DeadlineAfter(timeout_milliseconds));
  });
}

int superoffload_look(int64_t trainer, superoffload_open_step_state* step, uint64_t* arrived) {
  return WithTrainer(trainer, [&](Trainer& impl) -> Status {
    if (step == nullptr) return NullArgument();
    impl.Look(step);
    return arrived == nullptr ? Status{} : impl.Arrived({arrived, impl.layout().parameter_count()});
  });
}
