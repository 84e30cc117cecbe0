// What ranks of a run make of each other's reports when they come together anew: a pure function, so that all of them
// come to the same. server/engine/README.md has the protocol that it is a part of.
#ifndef SUPEROFFLOAD_CLIENT_SRC_AGREEMENT_H_
#define SUPEROFFLOAD_CLIENT_SRC_AGREEMENT_H_

#include <cstdint>
#include <span>

#include "client/src/status.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// superoffload_agree; `rank` is below the number of reports.
Status Agree(std::span<const superoffload_run_report> reports, uint32_t rank, superoffload_run_decision* decision);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_AGREEMENT_H_
