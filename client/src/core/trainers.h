// The trainers of this process, by the numbers that languages and calls of XLA carry.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_TRAINERS_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_TRAINERS_H_

#include <cstdint>
#include <memory>

#include "client/src/core/trainer.h"
#include "client/src/status.h"

namespace superoffload::client {

int64_t AddTrainer(std::unique_ptr<Trainer> trainer);

// FAILED_PRECONDITION: closed. Shared, because a call may still run when it is closed.
Status FindTrainer(int64_t number, std::shared_ptr<Trainer>* trainer);

// Returns once no call submits any more.
void RemoveTrainer(int64_t number);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_TRAINERS_H_
