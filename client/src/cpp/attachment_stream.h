// The AttachOptimizer stream: the attachment lives as long as this does.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CPP_ATTACHMENT_STREAM_H_
#define SUPEROFFLOAD_CLIENT_SRC_CPP_ATTACHMENT_STREAM_H_

#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <string>

#include "client/src/cpp/calls.h"
#include "superoffload/client.hpp"

namespace superoffload {

struct Attachment::Stream {
  explicit Stream(const std::string& token) : context(token) {}
  ~Stream() {
    context.TryCancel();
    if (messages != nullptr) messages->Finish();
  }

  CallContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachOptimizerRequest, v1::AttachOptimizerResponse>> messages;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_SRC_CPP_ATTACHMENT_STREAM_H_
