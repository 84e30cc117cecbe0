#include "superoffload/superoffload_xla.h"

#include <map>
#include <mutex>
#include <vector>

#include "client/src/c_border.h"
#include "client/src/xla/piece_submitter.h"
#include "client/src/xla/submitters.h"

namespace superoffload::client {
namespace {

struct Table {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<PieceSubmitter>> submitters;
  int64_t last = 0;
};

// Never destroyed: XLA's threads may call handlers while the process ends.
Table& Submitters() {
  static auto* const table = new Table;
  return *table;
}

template <typename Call>
int WithSubmitter(int64_t number, Call call) {
  return Guarded([&]() -> Status {
    std::shared_ptr<PieceSubmitter> submitter;
    if (Status status = FindSubmitter(number, &submitter); !status.ok()) return status;
    return call(*submitter);
  });
}

Status NullArgument() { return Error(Code::kInvalidArgument, "NULL argument"); }

}  // namespace

int64_t AddSubmitter(std::unique_ptr<PieceSubmitter> submitter) {
  Table& table = Submitters();
  const std::lock_guard lock(table.mutex);
  table.submitters.emplace(++table.last, std::move(submitter));
  return table.last;
}

Status FindSubmitter(int64_t number, std::shared_ptr<PieceSubmitter>* submitter) {
  Table& table = Submitters();
  const std::lock_guard lock(table.mutex);
  const auto found = table.submitters.find(number);
  if (found == table.submitters.end()) {
    return Error(Code::kFailedPrecondition, "the optimizer for which this function was compiled is closed; build a new "
                 "one, and the functions that use it");
  }
  *submitter = found->second;
  return {};
}

void RemoveSubmitter(int64_t number) {
  std::shared_ptr<PieceSubmitter> removed;
  Table& table = Submitters();
  {
    const std::lock_guard lock(table.mutex);
    const auto found = table.submitters.find(number);
    if (found == table.submitters.end()) return;
    removed = std::move(found->second);
    table.submitters.erase(found);
  }
  removed->Attach(nullptr);  // waits for a handler that runs
}

}  // namespace superoffload::client

using superoffload::client::Code;
using superoffload::client::Error;
using superoffload::client::GradientPiece;
using superoffload::client::Guarded;
using superoffload::client::NullArgument;
using superoffload::client::PieceSubmitter;
using superoffload::client::Status;
using superoffload::client::WithSubmitter;

int superoffload_xla_open(const superoffload_xla_options* options, int64_t* submitter) {
  return Guarded([&]() -> Status {
    if (options == nullptr || submitter == nullptr) return NullArgument();
    std::unique_ptr<PieceSubmitter> created;
    if (Status status = PieceSubmitter::Create(*options, &created); !status.ok()) return status;
    *submitter = superoffload::client::AddSubmitter(std::move(created));
    return {};
  });
}

void superoffload_xla_close(int64_t submitter) { superoffload::client::RemoveSubmitter(submitter); }

int superoffload_xla_attach(int64_t submitter, superoffload_attachment* attachment) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    impl.Attach(attachment == nullptr ? nullptr : attachment->impl.get());
    return {};
  });
}

int superoffload_xla_set_scalars(int64_t submitter, uint32_t group, const double* scalars, uint32_t count) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    if (scalars == nullptr) return NullArgument();
    return impl.SetScalars(group, {scalars, count});
  });
}

int superoffload_xla_step_over(int64_t submitter, uint32_t next_slot, uint64_t committed_steps,
                               double gradient_scale) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    impl.StepOver(next_slot, committed_steps, gradient_scale);
    return {};
  });
}

int superoffload_xla_hand_over(int64_t submitter, uint32_t parameter, uint64_t first, uint64_t elements,
                               const void* data) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    if (data == nullptr && elements > 0) return NullArgument();
    const GradientPiece piece{parameter, first, elements, data};
    return impl.HandOver({&piece, 1});
  });
}

int superoffload_xla_absent(int64_t submitter, uint32_t parameter) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) { return impl.Absent(parameter); });
}

int superoffload_xla_arrived(int64_t submitter, uint64_t* elements) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    if (elements == nullptr) return NullArgument();
    return impl.Arrived({elements, impl.parameter_count()});
  });
}

int superoffload_xla_look(int64_t submitter, superoffload_xla_open_step* step) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    if (step == nullptr) return NullArgument();
    impl.Look(step);
    return {};
  });
}

int superoffload_xla_take(int64_t submitter, superoffload_xla_open_step* step, uint32_t* buckets) {
  return WithSubmitter(submitter, [&](PieceSubmitter& impl) -> Status {
    if (step == nullptr || buckets == nullptr) return NullArgument();
    return impl.Take(step, {buckets, impl.bucket_count()});
  });
}

int superoffload_xla_handler(const char* name, const char* platform, void** handler) {
  return Guarded([&]() -> Status {
    if (name == nullptr || platform == nullptr || handler == nullptr) return NullArgument();
    *handler = superoffload::client::FindHandler(name, platform);
    if (*handler != nullptr) return {};
    if (!superoffload::client::HasHandlers()) {
      return Error(Code::kUnimplemented,
                   "this libsuperoffload was built without XLA's headers, so nothing can be handed over inside jit: "
                   "install the wheel, which has them (deploy/wheel.sh makes it), or build where jaxlib is installed; "
                   "step() outside of jit works without, with parameters on the CPU");
    }
    return Error(Code::kUnimplemented, "there is no handler ", name, " for ", platform,
                 "; gradients can be handed over on the CPU and on NVIDIA GPUs");
  });
}
