// The commands of superoffloadctl.
#ifndef SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_
#define SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "superoffload/client.hpp"

namespace superoffload::ctl {

struct Arguments {
  std::vector<std::string> operands;
  bool json = false;
  uint64_t count = 0;  // watch: steps after which it stops; 0 goes on
  uint64_t step = 0;  // of a run's checkpoint; 0: none

  // The first operand of a command about one optimizer, as the daemon takes it; empty when it was not given.
  std::string name() const { return operands.empty() ? "" : operands.front(); }
};

struct Command {
  std::string_view name;
  std::string_view operands;  // as the usage shows them
  size_t min_operands;
  size_t max_operands;
  bool names_optimizer;  // the first operand is an optimizer's name
  absl::Status (*run)(Client& client, const Arguments& arguments);
};

// The name with its owner, UID/NAME: `uid`, if it is given, else the only one who has an optimizer of that name.
// FAILED_PRECONDITION: several users have. A name of nobody's stays as it is.
absl::StatusOr<std::string> NameWithOwner(Client& client, const std::string& name, std::optional<uint32_t> uid);

// Null when there is none of that name.
const Command* FindCommand(std::string_view name);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_
