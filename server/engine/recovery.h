// Brings state that a killed engine left behind to its last committed step.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_
#define SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_

#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/worker_pool.h"

namespace superoffload::engine {

// Finishes the chunks whose update was cut off, then absorbs every committed gradient that a chunk still lacks. May
// itself be killed at any instruction and run again.
void AbsorbCommitted(const Layout& layout, const OptimizerMemory& memory, Record& record, WorkerPool& pool);

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_
