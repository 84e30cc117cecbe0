#include "server/host/systemd_unit.h"

#include <systemd/sd-bus.h>
#include <systemd/sd-login.h>

#include <cstdlib>

namespace superoffload::host {
namespace {

constexpr char kSystemd[] = "org.freedesktop.systemd1";

// Calls `ask` with the bus and the object path of the unit; false when there is neither.
template <typename Ask>
bool AskOfUnit(Ask ask) {
  char *unit = nullptr, *path = nullptr;
  sd_bus* bus = nullptr;
  const bool answered = ::sd_pid_get_unit(0, &unit) >= 0 &&
                        ::sd_bus_path_encode("/org/freedesktop/systemd1/unit", unit, &path) >= 0 &&
                        ::sd_bus_open_system(&bus) >= 0 && ask(bus, path);
  ::sd_bus_flush_close_unref(bus);
  for (char* text : {unit, path}) std::free(text);
  return answered;
}

}  // namespace

std::string UnitsJobType() {
  char* type = nullptr;
  const bool found = AskOfUnit([&type](sd_bus* bus, const char* path) {
    sd_bus_message* reply = nullptr;
    const char* job = nullptr;
    uint32_t job_id = 0;
    const bool answered = ::sd_bus_get_property(bus, kSystemd, path, "org.freedesktop.systemd1.Unit", "Job", nullptr,
                                                &reply, "(uo)") >= 0 &&
                          ::sd_bus_message_read(reply, "(uo)", &job_id, &job) >= 0 && job_id != 0 &&
                          ::sd_bus_get_property_string(bus, kSystemd, job, "org.freedesktop.systemd1.Job", "JobType",
                                                       nullptr, &type) >= 0;
    ::sd_bus_message_unref(reply);
    return answered;
  });
  const std::string result = found ? type : "";
  std::free(type);
  return result;
}

std::optional<uint32_t> UnitsDescriptorStoreMax() {
  uint32_t most = 0;
  const bool found = AskOfUnit([&most](sd_bus* bus, const char* path) {
    return ::sd_bus_get_property_trivial(bus, kSystemd, path, "org.freedesktop.systemd1.Service",
                                         "FileDescriptorStoreMax", nullptr, 'u', &most) >= 0;
  });
  return found ? std::optional(most) : std::nullopt;
}

}  // namespace superoffload::host
