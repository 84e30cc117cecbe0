// What superoffloadd does with checkpoints as a program, without being a daemon: superoffloadctl inspect and export run
// it.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_COMMAND_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_COMMAND_H_

#include <optional>

namespace superoffload::checkpoint {

// Does what --inspect_checkpoint or --export_checkpoint ask for and returns the exit status: 0, 1 after an error or
// when what was inspected is not whole. Nothing: neither is given.
std::optional<int> RunCheckpointCommand();

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_COMMAND_H_
