// What systemd says of the service that this process is, over the system's bus.
#ifndef SUPEROFFLOAD_SERVER_HOST_SYSTEMD_UNIT_H_
#define SUPEROFFLOAD_SERVER_HOST_SYSTEMD_UNIT_H_

#include <cstdint>
#include <optional>
#include <string>

namespace superoffload::host {

// The type of the job that it has for the unit ("stop", "restart"), or "" when there is none or the bus does not tell.
std::string UnitsJobType();

// FileDescriptorStoreMax=; nothing when the bus does not tell.
std::optional<uint32_t> UnitsDescriptorStoreMax();

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_SYSTEMD_UNIT_H_
