// Lets XLA on the CPU call handlers that are for the GPU: its memory stands for the GPU's, and the default stream, on
// which the fake driver works in the calling thread, for XLA's.
#include <array>
#include <cstddef>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace {

constexpr size_t kMost = 8;
std::array<XLA_FFI_Handler*, kMost> handlers;

XLA_FFI_Error* DefaultStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

template <size_t kNumber>
XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = DefaultStream;
  XLA_FFI_CallFrame call = *frame;
  call.api = &api;
  return handlers[kNumber](&call);
}

template <size_t... kNumbers>
constexpr std::array<XLA_FFI_Handler*, kMost> Calls(std::index_sequence<kNumbers...>) {
  return {Call<kNumbers>...};
}

}  // namespace

// What to register for the CPU in the place of `handler`; null when there is no room for more.
extern "C" void* fakeXlaGpuHandler(void* handler) {
  constexpr auto kCalls = Calls(std::make_index_sequence<kMost>());
  static size_t count = 0;
  if (count == kMost) return nullptr;
  handlers[count] = reinterpret_cast<XLA_FFI_Handler*>(handler);
  return reinterpret_cast<void*>(kCalls[count++]);
}
