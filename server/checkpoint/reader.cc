#include "server/checkpoint/reader.h"

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/read_blocks.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/saved_tensors.h"
#include "server/checkpoint/shard_plan.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

class Reader {
 public:
  Reader(const ReadScope& scope, const kernels::Algorithm& algorithm)
      : scope_(scope), algorithm_(algorithm), saved_(scope, BlockedArraysOf(algorithm)) {}

  absl::Status Open(const RestoreSource& source) {
    if (source.directories.empty() && source.files.empty()) {
      return absl::InvalidArgumentError("directories is empty; name the checkpoint's directory");
    }
    for (const std::string& directory : source.directories) {
      if (absl::Status status = OpenDirectory(directory); !status.ok()) return status;
    }
    for (const TensorFile& file : source.files) {
      if (absl::Status status = CheckAbsolute(file.path, "files"); !status.ok()) return status;
      if (absl::Status status = SetStep(file.path, file.committed_steps); !status.ok()) return status;
      if (absl::Status status = saved_.AddFile(file.path, file.committed_steps); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Finds every tensor of the optimizer. Scalars that the checkpoint does not have are those of `groups`; so a
  // checkpoint can be restored into an optimizer of another algorithm that has the same arrays.
  absl::Status Match(const engine::OptimizerSpec& spec, std::vector<engine::Scalars> groups) {
    moment_.groups = std::move(groups);
    // By group here: one of its parameters, and the hyper-parameters that it was saved with.
    std::map<size_t, std::pair<const engine::ParameterSpec*, const NamedScalars*>> saved_groups;
    for (const engine::ParameterSpec& parameter : spec.parameters) {
      const Box box = parameter.global_shape.empty()
                          ? Box::Whole(parameter.shape)
                          : Box{parameter.global_shape, parameter.global_offset, parameter.shape};
      std::optional<uint64_t> steps;
      const kernels::Algorithm& algorithm = parameter.in_fp32 ? *algorithm_.in_fp32 : algorithm_;
      for (const kernels::StateArray& array : algorithm.arrays) {
        if (array.elements_per_entry > 1) {  // comes with its codes
          tensors_.emplace_back();
          continue;
        }
        absl::StatusOr<SavedTensors::Tensor> tensor =
            saved_.Find(TensorName(array, parameter.name), SafetensorsDType(array.dtype), box);
        if (!tensor.ok()) return tensor.status();
        tensors_converted_ += array.codec == nullptr && tensor->converts() ? 1 : 0;
        if (absl::Status status = CheckBlocks(*tensor, array); !status.ok()) return status;
        for (const SavedTensors::Slice* slice : tensor->slices) {
          if (steps.value_or(slice->steps) != slice->steps) {
            return absl::FailedPreconditionError(
                absl::StrCat("ranks have saved parameter \"", parameter.name, "\" after ", *steps, " and after ",
                             slice->steps, " steps with a gradient; restore with the number of ranks that was saved"));
          }
          steps = slice->steps;
        }
        tensors_.push_back(*std::move(tensor));
      }
      moment_.parameter_steps.push_back(steps.value_or(moment_.statistics.committed_steps));
      const auto group = groups_.find(parameter.name);
      if (group == groups_.end()) continue;
      const auto [first, is_first] = saved_groups.try_emplace(parameter.group, &parameter, &group->second);
      if (!is_first && *first->second.second != group->second) {
        return absl::FailedPreconditionError(absl::StrCat(
            "parameters \"", first->second.first->name, "\" and \"", parameter.name,
            "\" are in one group, and the checkpoint has them in two, with other hyper-parameters; build the optimizer "
            "with the groups that were saved"));
      }
      for (size_t i = 0; i < algorithm_.scalars.size(); ++i) {
        const auto scalar = group->second.find(std::string(algorithm_.scalars[i].name));
        if (scalar != group->second.end()) moment_.groups[parameter.group][i] = scalar->second;
      }
    }
    for (const engine::Scalars& group : moment_.groups) {
      if (absl::Status status = engine::ValidateScalars(algorithm_, group); !status.ok()) {
        return absl::DataLossError(absl::StrCat("the checkpoint's hyper-parameters are damaged: ", status.message()));
      }
    }
    return absl::OkStatus();
  }

  // Compares every file that is used with its checksum.
  absl::Status Verify() const { return SavedTensors::Verify(tensors_, scope_); }

  absl::Status Load(optimizer::HostedOptimizer& optimizer) {
    if (seed_) optimizer.set_seed(*seed_);
    auto tensor = tensors_.begin();
    for (const engine::Placement& placement : optimizer.layout().placements) {
      const engine::StateFormat& format = optimizer.layout().FormatOf(placement);
      const auto at = [&](size_t array) {
        return optimizer.memory().state.data() + format.Byte(array, placement.state_offset);
      };
      for (size_t a = 0; a < format.arrays.size(); ++a, ++tensor) {
        const kernels::StateArray& array = format.arrays[a].array;
        if (array.elements_per_entry > 1) continue;
        absl::Status status;
        if (array.codec != nullptr) {
          status =
              ReadBlocks(*tensor, *format.algorithm, array, at(a), at(array.codec->scales), scope_, &blocks_rounded_);
        } else if (HasBlocks(*tensor)) {
          status = ReadDecoded(*tensor, {at(a), array.dtype}, scope_);
        } else {
          status = SavedTensors::Read(*tensor, at(a), scope_);
        }
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  const engine::StepEngine::Moment& moment() const { return moment_; }
  Restored restored() const { return {blocks_rounded_, tensors_converted_}; }

  // The run that an optimizer goes on with: that of the checkpoint of one of this name, or of rank 0 of its run. 0 when
  // there is none, or it does not know.
  uint64_t RunOf(const std::string& optimizer, const engine::RunMember& member) const {
    if (const auto run = runs_.find(member.run); run != runs_.end()) return run->second;
    const auto found = optimizers_.find(optimizer);
    return found == optimizers_.end() ? 0 : found->second;
  }

 private:
  static absl::Status CheckAbsolute(const fs::path& path, const char* field) {
    if (path.is_absolute()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(field, ": \"", path.string(), "\" must be an absolute path"));
  }

  absl::Status SetStep(const std::string& from, uint64_t committed_steps) {
    if (committed_steps > engine::kMaxSteps) {
      return absl::InvalidArgumentError(absl::StrCat(from, " is of step ", committed_steps,
                                                     " but an optimizer makes at most ", engine::kMaxSteps,
                                                     " committed steps"));
    }
    uint64_t& all = moment_.statistics.committed_steps;
    if (std::exchange(any_, true) && all != committed_steps) {
      return absl::InvalidArgumentError(absl::StrCat(from, " is of step ", committed_steps, " but another is of step ",
                                                     all, "; name checkpoints of one step"));
    }
    all = committed_steps;
    return absl::OkStatus();
  }

  // Of parts that were rounded under one.
  absl::Status SetSeed(const std::string& from, const Index& index) {
    if (!index.seed) return absl::OkStatus();
    if (!seed_) seed_ = index.seed;
    if (seed_ == index.seed) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(from, " was rounded under seed ", *index.seed,
                                                   " but another checkpoint under ", *seed_,
                                                   "; name the parts of one checkpoint"));
  }

  // Parts of one run are of one training of it.
  absl::Status SetLineage(const std::string& from, const Index& index) {
    if (index.run_name.empty() || index.lineage == 0) return absl::OkStatus();
    if (lineages_.emplace(index.run_name, index.lineage).first->second == index.lineage) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(from, " is of run \"", index.run_name,
                                                   "\" after another restore than the others, so its step is "
                                                   "another; name the parts of one checkpoint"));
  }

  absl::Status OpenDirectory(const fs::path& directory) {
    if (absl::Status status = CheckAbsolute(directory, "directories"); !status.ok()) return status;
    absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(directory, scope_);
    if (!checkpoint.ok()) return checkpoint.status();
    for (const Part& part : checkpoint->parts) {
      const Index& index = part.index;
      if (absl::Status status = SetStep(part.directory, index.committed_steps); !status.ok()) return status;
      if (absl::Status status = SetLineage(part.directory, index); !status.ok()) return status;
      if (absl::Status status = SetSeed(part.directory, index); !status.ok()) return status;
      optimizers_[index.optimizer] = index.run;
      if (!index.run_name.empty() && index.rank == 0) runs_[index.run_name] = index.run;
      for (const auto& [parameter, group] : index.parameter_groups) groups_[parameter] = index.groups[group];
      if (absl::Status status = saved_.AddPart(part); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const ReadScope& scope_;
  const kernels::Algorithm& algorithm_;
  engine::StepEngine::Moment moment_;
  bool any_ = false;  // a step is known
  std::optional<uint64_t> seed_;
  uint64_t blocks_rounded_ = 0, tensors_converted_ = 0;
  std::map<std::string, uint64_t> optimizers_;  // runs by name of the optimizer
  std::map<std::string, uint64_t> runs_;        // those of ranks 0 by name of the run of several ranks
  std::map<std::string, uint64_t> lineages_;    // by name of the run
  std::map<std::string, NamedScalars> groups_;  // by parameter name
  SavedTensors saved_;
  std::vector<SavedTensors::Tensor> tensors_;  // per parameter and, in it, per state array of its format
};

}  // namespace

absl::StatusOr<Restored> RestoreCheckpoint(optimizer::HostedOptimizer& optimizer,
                                           const optimizer::AttachedTrainer& restorer, const RestoreSource& source,
                                           const ReadScope& scope) {
  Reader reader(scope, *optimizer.spec().algorithm);
  if (absl::Status status = reader.Open(source); !status.ok()) return status;
  std::vector<engine::Scalars> groups =
      source.directories.empty() ? optimizer.engine().groups() : optimizer.spec().groups;
  if (absl::Status status = reader.Match(optimizer.spec(), std::move(groups)); !status.ok()) return status;
  if (absl::Status status = reader.Verify(); !status.ok()) return status;
  if (absl::Status status =
          optimizer.Restore(restorer, reader.moment(), source.lineage, [&] { return reader.Load(optimizer); });
      !status.ok()) {
    return status;
  }
  const uint64_t run = reader.RunOf(optimizer.id().name, optimizer.spec().member);
  if (run != 0) optimizer.set_run(run);
  return reader.restored();
}

}  // namespace superoffload::checkpoint
