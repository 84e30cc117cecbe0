#include "client/src/c_border.h"
#include "client/src/xla/xla_handlers.h"
#include "superoffload/superoffload.h"

using superoffload::client::Code;
using superoffload::client::Error;
using superoffload::client::Guarded;
using superoffload::client::Status;

int superoffload_xla_handler(const char* name, const char* platform, void** handler) {
  return Guarded([&]() -> Status {
    if (name == nullptr || platform == nullptr || handler == nullptr) {
      return Error(Code::kInvalidArgument, "NULL argument");
    }
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
