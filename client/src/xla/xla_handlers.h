// FFI handlers of XLA, by name.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_XLA_HANDLERS_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_XLA_HANDLERS_H_

namespace superoffload::client {

// For its platform ("cpu", "cuda"); null: there is none.
void* FindHandler(const char* name, const char* platform);

// Whether this library was built with XLA's headers.
bool HasHandlers();

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_XLA_HANDLERS_H_
