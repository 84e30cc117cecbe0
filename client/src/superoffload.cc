// superoffload.h: opaque handles in, status codes out.
#include "superoffload/superoffload.h"

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

void* Base(const Mapping& mapping, size_t* bytes) {
  if (bytes != nullptr) *bytes = mapping.bytes();
  return mapping.data();
}

}  // namespace

const char* superoffload_version(void) { return SUPEROFFLOAD_VERSION; }

size_t superoffload_size_of(const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
#define SUPEROFFLOAD_IF_WANTED(type) \
  if (wanted == #type) return sizeof(type)
  SUPEROFFLOAD_IF_WANTED(superoffload_answer);
  SUPEROFFLOAD_IF_WANTED(superoffload_bucket);
  SUPEROFFLOAD_IF_WANTED(superoffload_gpu_options);
  SUPEROFFLOAD_IF_WANTED(superoffload_gpu_report);
  SUPEROFFLOAD_IF_WANTED(superoffload_open_step_state);
  SUPEROFFLOAD_IF_WANTED(superoffload_parameter);
  SUPEROFFLOAD_IF_WANTED(superoffload_piece);
  SUPEROFFLOAD_IF_WANTED(superoffload_range);
  SUPEROFFLOAD_IF_WANTED(superoffload_run_decision);
  SUPEROFFLOAD_IF_WANTED(superoffload_run_report);
  SUPEROFFLOAD_IF_WANTED(superoffload_run_terms);
  SUPEROFFLOAD_IF_WANTED(superoffload_source);
  SUPEROFFLOAD_IF_WANTED(superoffload_step_end);
  SUPEROFFLOAD_IF_WANTED(superoffload_trainer_options);
  SUPEROFFLOAD_IF_WANTED(superoffload_verdict);
#undef SUPEROFFLOAD_IF_WANTED
  return 0;
}

const char* superoffload_last_error(void) { return LastError().c_str(); }

int superoffload_connect(const char* descriptor_socket, superoffload_connection** connection) {
  return Guarded([&]() -> Status {
    if (descriptor_socket == nullptr || connection == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    auto created = std::make_unique<superoffload_connection>();
    Status status = DescriptorConnection::Connect(descriptor_socket, &created->impl);
    if (status.ok()) *connection = created.release();
    return status;
  });
}

const char* superoffload_token(const superoffload_connection* connection) {
  return connection == nullptr ? "" : connection->impl->token().c_str();
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

void* superoffload_parameters(const superoffload_attachment* attachment, size_t* bytes) {
  return attachment == nullptr ? nullptr : Base(attachment->impl->parameters(), bytes);
}

void* superoffload_gradients(const superoffload_attachment* attachment, size_t* bytes) {
  return attachment == nullptr ? nullptr : Base(attachment->impl->gradients(), bytes);
}

const void* superoffload_state(superoffload_attachment* attachment, size_t* bytes) {
  const Mapping* state = nullptr;
  const int code = WithHandle(attachment, [&](StepPlane& impl) { return impl.State(&state); });
  return code == 0 ? Base(*state, bytes) : nullptr;
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

int superoffload_find_difference(const superoffload_range* ranges, uint32_t count, uint32_t threads,
                                 uint32_t* range) {
  return Guarded([&]() -> Status {
    if (range == nullptr || (count > 0 && ranges == nullptr)) return Error(Code::kInvalidArgument, "NULL argument");
    *range = static_cast<uint32_t>(superoffload::client::FindDifference({ranges, count}, threads));
    return {};
  });
}
