#include "tests/simulation/measured_host.h"

#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "kernels/base/check.h"
#include "server/plan/machine_description.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload {

simulator::Machine MeasureHost() {
  std::string path = std::filesystem::temp_directory_path() / "so-machine-XXXXXX";
  const int fd = ::mkstemp(path.data());
  SUPEROFFLOAD_CHECK(fd >= 0, path);
  ::close(fd);
  const std::string command =
      ADAM_BENCH_BINARY " --elements=33554432 --repetitions=7 --machine_output=" + path + " > /dev/null";
  SUPEROFFLOAD_CHECK(std::system(command.c_str()) == 0, command);
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  v1::PlanRequest request;
  SUPEROFFLOAD_CHECK(google::protobuf::TextFormat::ParseFromString(text, request.mutable_machine()), text);
  const absl::StatusOr<plan::DescribedMachine> described = plan::ToMachine(request);
  SUPEROFFLOAD_CHECK(described.ok(), std::string(described.status().message()));
  return described->machine;
}

simulator::Machine WithoutLink(const std::vector<simulator::Machine>& measured) {
  const auto median = [&](auto field) {
    std::vector<double> values;
    for (const simulator::Machine& machine : measured) values.push_back(field(machine));
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  using simulator::Machine;
  constexpr double kNone = std::numeric_limits<double>::infinity();
  Machine machine = measured.front();
  machine.host.bandwidth = median([](const Machine& m) { return m.host.bandwidth; });
  machine.host.core_bandwidth = median([](const Machine& m) { return m.host.core_bandwidth; });
  machine.passes.absorb = median([](const Machine& m) { return m.passes.absorb; });
  machine.passes.publish = median([](const Machine& m) { return m.passes.publish; });
  machine.passes.publish_masters = median([](const Machine& m) { return m.passes.publish_masters; });
  machine.trainer_cores = machine.host.cores - 1;
  machine.gpu.memory_bandwidth = kNone;  // nothing is packed
  machine.h2d = machine.d2h = {{{1, kNone}}};
  return machine;
}

}  // namespace superoffload
