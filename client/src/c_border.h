// What the C functions share: handles, and the border itself, across which nothing is thrown.
#ifndef SUPEROFFLOAD_CLIENT_SRC_C_BORDER_H_
#define SUPEROFFLOAD_CLIENT_SRC_C_BORDER_H_

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "client/src/core/step_plane.h"
#include "client/src/core/trainer.h"
#include "client/src/core/trainers.h"
#include "client/src/descriptor_connection.h"
#include "client/src/status.h"

struct superoffload_connection {
  std::shared_ptr<superoffload::client::DescriptorConnection> impl;  // its attachments', too
};

struct superoffload_attachment {
  std::unique_ptr<superoffload::client::StepPlane> impl;
};

namespace superoffload::client {

// Of this thread.
inline std::string& LastError() {
  thread_local std::string text;
  return text;
}

// Runs `call`, keeps its sentence, returns its code.
template <typename Call>
int Guarded(Call call) {
  try {
    Status status = call();
    LastError() = std::move(status.message);
    return static_cast<int>(status.code);
  } catch (const std::bad_alloc&) {
    return static_cast<int>(Code::kResourceExhausted);
  } catch (const std::exception&) {
    return static_cast<int>(Code::kInternal);
  }
}

template <typename Handle, typename Call>
int WithHandle(Handle* handle, Call call) {
  return Guarded([&]() -> Status {
    if (handle == nullptr) return Error(Code::kInvalidArgument, "the handle is NULL");
    return call(*handle->impl);
  });
}

template <typename Call>
int WithTrainer(int64_t number, Call call) {
  return Guarded([&]() -> Status {
    std::shared_ptr<Trainer> trainer;
    if (Status status = FindTrainer(number, &trainer); !status.ok()) return status;
    return call(*trainer);
  });
}

inline Deadline DeadlineAfter(int64_t milliseconds) {
  // Longer than a year is for ever, and does not overflow the clock.
  constexpr int64_t kForEver = int64_t{1000} * 60 * 60 * 24 * 365;
  if (milliseconds < 0 || milliseconds > kForEver) return std::nullopt;
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_C_BORDER_H_
