// superoffload.h: opaque handles in, status codes out.
#include "superoffload/superoffload.h"

#include <cstring>
#include <string_view>

#include "client/src/agreement.h"
#include "client/src/c_border.h"
#include "client/src/memory_passes.h"
#include "superoffload/superoffload_gpu.h"

namespace {

using superoffload::client::Code;
using superoffload::client::DescriptorConnection;
using superoffload::client::Error;
using superoffload::client::Guarded;
using superoffload::client::LastError;
using superoffload::client::Mapping;
using superoffload::client::Status;
using superoffload::client::StepPlane;
using superoffload::client::WithHandle;

Status FindRegion(StepPlane& plane, uint32_t region, const Mapping** mapping) {
  switch (region) {
    case SUPEROFFLOAD_REGION_PARAMETERS:
      *mapping = &plane.parameters();
      return {};
    case SUPEROFFLOAD_REGION_GRADIENTS:
      *mapping = &plane.gradients();
      return {};
    case SUPEROFFLOAD_REGION_STATE:
      return plane.State(mapping);
    default:
      return Error(Code::kInvalidArgument, "an attachment has no region ", region);
  }
}

}  // namespace

size_t superoffload_size_of(const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
#define SUPEROFFLOAD_IF_WANTED(type) \
  if (wanted == #type) return sizeof(type)
  SUPEROFFLOAD_IF_WANTED(superoffload_answer);
  SUPEROFFLOAD_IF_WANTED(superoffload_awaited);
  SUPEROFFLOAD_IF_WANTED(superoffload_bucket);
  SUPEROFFLOAD_IF_WANTED(superoffload_gpu_options);
  SUPEROFFLOAD_IF_WANTED(superoffload_gpu_report);
  SUPEROFFLOAD_IF_WANTED(superoffload_gradients);
  SUPEROFFLOAD_IF_WANTED(superoffload_open_step_state);
  SUPEROFFLOAD_IF_WANTED(superoffload_parameter);
  SUPEROFFLOAD_IF_WANTED(superoffload_piece);
  SUPEROFFLOAD_IF_WANTED(superoffload_range);
  SUPEROFFLOAD_IF_WANTED(superoffload_run_decision);
  SUPEROFFLOAD_IF_WANTED(superoffload_run_report);
  SUPEROFFLOAD_IF_WANTED(superoffload_run_terms);
  SUPEROFFLOAD_IF_WANTED(superoffload_shard);
  SUPEROFFLOAD_IF_WANTED(superoffload_step_end);
  SUPEROFFLOAD_IF_WANTED(superoffload_trainer_options);
  SUPEROFFLOAD_IF_WANTED(superoffload_verdict);
#undef SUPEROFFLOAD_IF_WANTED
  return 0;
}

const char* superoffload_last_error(void) { return LastError().c_str(); }

int superoffload_connect(const char* descriptor_socket, superoffload_connection** connection, char token[65]) {
  return Guarded([&]() -> Status {
    if (descriptor_socket == nullptr || connection == nullptr || token == nullptr) {
      return Error(Code::kInvalidArgument, "NULL argument");
    }
    auto created = std::make_unique<superoffload_connection>();
    Status status = DescriptorConnection::Connect(descriptor_socket, &created->impl);
    if (!status.ok()) return status;
    std::memcpy(token, created->impl->token().c_str(), created->impl->token().size() + 1);
    *connection = created.release();
    return {};
  });
}

void superoffload_disconnect(superoffload_connection* connection) {
  if (connection == nullptr) return;
  connection->impl->Close();
  delete connection;
}

int superoffload_attach(superoffload_connection* connection, uint64_t attachment_epoch, uint64_t last_step,
                        uint32_t bucket_count, superoffload_attachment** attachment) {
  return WithHandle(connection, [&](DescriptorConnection&) -> Status {
    if (attachment == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    auto created = std::make_unique<superoffload_attachment>();
    Status status = StepPlane::Create(connection->impl, attachment_epoch, last_step, bucket_count, &created->impl);
    if (status.ok()) *attachment = created.release();
    return status;
  });
}

void superoffload_detach(superoffload_attachment* attachment) { delete attachment; }

int superoffload_lent_memory(superoffload_attachment* attachment, uint64_t number, int* descriptor, size_t* bytes) {
  return WithHandle(attachment, [&](StepPlane& impl) -> Status {
    if (descriptor == nullptr || bytes == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    superoffload::FileDescriptor file;
    if (Status status = impl.connection().FetchLent(impl.epoch(), number, &file, bytes); !status.ok()) return status;
    *descriptor = file.Release();
    return {};
  });
}

int superoffload_memory(superoffload_attachment* attachment, uint32_t region, void** data, size_t* bytes) {
  return WithHandle(attachment, [&](StepPlane& impl) -> Status {
    if (data == nullptr || bytes == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    const Mapping* mapping = nullptr;
    if (Status status = FindRegion(impl, region, &mapping); !status.ok()) return status;
    *data = mapping->data();
    *bytes = mapping->bytes();
    return {};
  });
}

int superoffload_agree(const superoffload_run_report* reports, uint32_t ranks, uint32_t rank,
                       superoffload_run_decision* decision) {
  return Guarded([&]() -> Status {
    if (reports == nullptr || decision == nullptr || rank >= ranks) {
      return Error(Code::kInvalidArgument, "superoffload_agree of rank ", rank, " of ", ranks, ", or without reports");
    }
    return superoffload::client::Agree({reports, ranks}, rank, decision);
  });
}

int superoffload_copy_and_digest(const superoffload_range* ranges, uint32_t count, uint32_t threads,
                                 uint64_t* digests) {
  return Guarded([&]() -> Status {
    if (count > 0 && (ranges == nullptr || digests == nullptr)) return Error(Code::kInvalidArgument, "NULL argument");
    superoffload::client::CopyAndDigest({ranges, count}, threads, {digests, count});
    return {};
  });
}
