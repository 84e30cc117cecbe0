#include "server/rpc/checkpoint_calls.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/act_as.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/task.h"
#include "server/rpc/durable.h"
#include "server/rpc/from_proto.h"
#include "server/rpc/to_proto.h"

namespace superoffload::rpc {
namespace {

constexpr absl::Duration kProgressInterval = absl::Milliseconds(200);

}  // namespace

grpc::Status CheckpointCalls::Write(grpc::ServerContext* context, const v1::CheckpointOptimizerRequest* request,
                                    grpc::ServerWriter<v1::CheckpointProgress>* writer) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_->Find(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  const auto operation = file_operations_.Begin((*optimizer)->id().uid);
  if (!operation.ok()) return ToGrpc(operation.status());
  checkpoint::WriteOptions options{.again = request->again(),
                                   .directory = [&](uint64_t) { return request->directory(); }};
  if (request->has_run_step()) {
    if ((*optimizer)->spec().member.run.empty()) {
      return ToGrpc(absl::InvalidArgumentError(absl::StrCat("run_step is ", request->run_step(), ", but optimizer \"",
                                                            (*optimizer)->id().name, "\" trains alone; leave it out")));
    }
    options.of_run = true;
    options.committed_steps = request->run_step();
  }
  checkpoint::Task task(*optimizer, std::move(options));
  if (absl::Status status = task.Start(); !status.ok()) return ToGrpc(status);
  v1::CheckpointProgress message;
  while (!task.WaitEnd(kProgressInterval)) {
    message.set_committed_steps(task.progress().committed_steps);
    message.set_bytes_written(task.progress().bytes_written);
    message.set_bytes_total(task.progress().bytes_total);
    if (context->IsCancelled() || stopping_ || !writer->Write(message)) task.Cancel();
  }
  const optimizer::CheckpointReport& report = task.report();
  observer_->OnCheckpoint((*optimizer)->id(), report);
  if (!report.status.ok()) return ToGrpc(report.status);
  message.set_committed_steps(report.committed_steps);
  message.set_bytes_written(report.bytes);
  message.set_bytes_total(report.bytes);
  message.set_directory(report.directory);
  message.set_run_whole(report.run_whole);
  writer->Write(message);
  return grpc::Status::OK;
}

absl::StatusOr<CheckpointCalls::Restored> CheckpointCalls::Restore(const grpc::ServerContextBase& context,
                                                                   const v1::RestoreOptimizerRequest& request) {
  absl::StatusOr<transport::Peer> peer = callers_->Authenticate(context);
  if (!peer.ok()) return peer.status();
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Get(*peer, request.name());
  if (!optimizer.ok()) return optimizer.status();
  const auto operation = file_operations_.Begin((*optimizer)->id().uid);
  if (!operation.ok()) return operation.status();
  absl::StatusOr<uint64_t> epoch = table_->NewEpoch();
  if (!epoch.ok()) return epoch.status();
  const checkpoint::RestoreSource source = ToRestoreSource(request);
  absl::StatusOr<checkpoint::Restored> restored;
  const absl::Status acted = checkpoint::RunAs((*optimizer)->id().uid, [&] {
    restored = checkpoint::RestoreCheckpoint(
        **optimizer, {*epoch, *peer, std::nullopt}, source,
        checkpoint::ReadScope::Of(**optimizer, [&] { return context.IsCancelled() || stopping_; }));
    return restored.status();
  });
  if (!acted.ok()) return acted;
  return Restored{*std::move(optimizer), *restored};
}

grpc::Status CheckpointCalls::Export(const grpc::ServerContextBase& context, const v1::ExportOptimizerRequest& request,
                                     v1::ExportOptimizerResponse* response) {
  absl::StatusOr<transport::Peer> peer = callers_->Authenticate(context);
  if (!peer.ok()) return ToGrpc(peer.status());
  absl::StatusOr<optimizer::OptimizerTable::DamagedDescriptors> damaged = table_->GetDamaged(*peer, request.name());
  if (!damaged.ok()) return ToGrpc(damaged.status());
  const auto export_ = exports_.Begin(damaged->id.uid);
  if (!export_.ok()) return ToGrpc(export_.status());
  const auto operation = file_operations_.Begin(damaged->id.uid);
  if (!operation.ok()) return ToGrpc(operation.status());
  absl::StatusOr<optimizer::Salvaged> salvaged = Salvage(damaged->id, std::move(damaged->fds), table_->pool());
  if (!salvaged.ok()) return ToGrpc(salvaged.status());
  checkpoint::Progress progress;
  optimizer::CheckpointReport report;
  absl::Status status = checkpoint::RunAs(damaged->id.uid, [&] {
    checkpoint::WriteOptions options;
    options.directory = [&](uint64_t) { return request.directory(); };
    options.doubts = salvaged->doubts;
    report = checkpoint::WriteCheckpoint(*salvaged->optimizer, options, stopping_, &progress);
    return report.status;
  });
  if (!status.ok()) return ToGrpc(status);
  response->set_directory(report.directory);
  response->set_committed_steps(report.committed_steps);
  response->set_bytes_written(report.bytes);
  response->set_doubts(salvaged->doubts);
  return grpc::Status::OK;
}

}  // namespace superoffload::rpc
