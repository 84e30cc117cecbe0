#include "client/src/xla/step_call.h"

#include <numeric>

namespace superoffload::client {

namespace {

StepReport ReportOf(const superoffload_verdict& verdict) {
  return {{Saturated(verdict.kind), Saturated(verdict.step), Saturated(verdict.committed_steps),
           Saturated(verdict.speculated_buckets), Saturated(verdict.republished_buckets),
           Saturated(verdict.consecutive_skips)},
          {static_cast<float>(verdict.global_norm), static_cast<float>(verdict.clip_coefficient)}};
}

}  // namespace

Status StepCall::Check() const {
  auto whole = numbers;  // const results give no access
  auto real = reals;
  if (gradients.size() != parameters.size() || count.element_count() != 1 || gradient_scale.element_count() != 1 ||
      whole->size_bytes() != sizeof(StepReport::numbers) || real->size_bytes() != sizeof(StepReport::reals)) {
    return Error(Code::kInvalidArgument, "wrong operands");
  }
  return {};
}

Status StepCall::Run(Trainer& trainer, const StepNumbers& given, std::optional<StreamNumber> stream,
                     StepReport* report) const {
  if (static_cast<uint64_t>(given.count) != trainer.committed_steps()) {
    return Error(Code::kFailedPrecondition,
                 "two steps inside one jit came in another order than in the program: make the second one's "
                 "gradients depend on the first one's parameters, or use a loop (jax.lax.scan, fori_loop)");
  }
  std::vector<GradientPiece> pieces;
  if (Status status = PiecesOf(trainer, parameters, -1, gradients, 0, &pieces); !status.ok()) return status;
  std::vector<int64_t> all(trainer.layout().parameter_count());
  std::iota(all.begin(), all.end(), 0);
  std::vector<void*> to;
  if (Status status = ParameterResults(trainer, all, published, &to); !status.ok()) return status;
  const std::vector<uint32_t> without(absent.begin(), absent.end()), places(scheduled.begin(), scheduled.end());
  const std::vector<double> values(given.scalars.begin(), given.scalars.end());
  superoffload_verdict verdict{};
  const WholeStep step{.pieces = pieces,
                       .absent = without,
                       .scheduled = places,
                       .scalars = values,
                       .gradient_scale = given.gradient_scale,
                       .max_grad_norm = max_grad_norm,
                       .parameters = to,
                       .stream = stream};
  if (Status status = trainer.Step(step, &verdict); !status.ok()) return status;
  *report = ReportOf(verdict);
  return {};
}

}  // namespace superoffload::client
