// The submitters of this process, by the numbers that calls of XLA carry.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_SUBMITTERS_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_SUBMITTERS_H_

#include <cstdint>
#include <memory>

#include "client/src/status.h"
#include "client/src/xla/piece_submitter.h"

namespace superoffload::client {

int64_t AddSubmitter(std::unique_ptr<PieceSubmitter> submitter);

// FAILED_PRECONDITION: closed. Shared, because a handler may still run when the trainer closes it.
Status FindSubmitter(int64_t number, std::shared_ptr<PieceSubmitter>* submitter);

void RemoveSubmitter(int64_t number);

// An FFI handler of XLA by name, for its platform ("cpu", "cuda"); null: there is none.
void* FindHandler(const char* name, const char* platform);

// Whether this library was built with XLA's headers.
bool HasHandlers();

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_SUBMITTERS_H_
