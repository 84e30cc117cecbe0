// The commands of superoffloadctl.
#ifndef SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_
#define SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "superoffload/client.hpp"

namespace superoffload::ctl {

struct Arguments {
  std::string name;  // of an optimizer; empty when it was not given
  bool json = false;
  uint64_t count = 0;  // watch: steps after which it stops; 0 goes on
};

struct Command {
  std::string_view name;
  size_t min_operands;
  size_t max_operands;
  absl::Status (*run)(Client& client, const Arguments& arguments);
};

// Null when there is none of that name.
const Command* FindCommand(std::string_view name);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_
