#include "tests/fault/simulated/checkpoint_writer.h"

#include <cstring>
#include <utility>

#include "tests/fault/simulated/simulated_daemon.h"

namespace superoffload::faults {

void CheckpointWriter::Start() {
  daemon_.After([this] { Request(); });
}

void CheckpointWriter::Request() {
  if (stopped_) return;
  if (writing_ || request_) {
    // A second one waits for the end of the first. Now and then somebody loses patience.
    if (request_ && ground_.random.Chance(0.05) && daemon_.machine()->CancelSnapshot(*request_)) {
      ground_.log.Add("checkpoint", "is cancelled");
      request_.reset();
    }
    return Start();
  }
  const uint64_t due = daemon_.machine()->statistics().committed_steps + ground_.random.Below(3);
  ground_.log.Add("checkpoint", "is asked for", due);
  request_ = 0;
  const uint64_t number = daemon_.machine()->RequestSnapshot(
      {.committed_steps = due}, [this](absl::StatusOr<engine::StepMachine::Moment> moment) {
        request_.reset();
        if (moment.ok()) Taken(*std::move(moment));
      });
  if (request_) request_ = number;
  Start();
}

void CheckpointWriter::Taken(engine::StepMachine::Moment moment) {
  ground_.log.Add("checkpoint", "has its moment", moment.statistics.committed_steps);
  writing_ = Checkpoint{std::move(moment), std::vector<std::byte>(ground_.layout.state_bytes)};
  ++number_;
  saved_ = claimed_ = 0;
  given_up_ = false;
  const uint64_t writers = ground_.random.Between(1, 2);
  for (uint64_t i = 0; i < writers; ++i) daemon_.After([this, number = number_] { Claim(number); });
}

void CheckpointWriter::Claim(uint64_t number) {
  if (!writing_ || number != number_ || given_up_) return;
  given_up_ = ground_.random.Chance(0.02);  // the disk is full
  if (given_up_ && claimed_ == 0) return End();
  if (given_up_) return;
  const std::optional<uint32_t> bucket = daemon_.machine()->ClaimSnapshotBucket();
  if (!bucket) return;
  ++claimed_;
  daemon_.After([this, number, bucket = *bucket] { Save(number, bucket); });
}

void CheckpointWriter::Save(uint64_t number, uint32_t bucket) {
  ground_.log.Add("checkpoint", "saves bucket", bucket);
  const engine::BucketLayout& place = ground_.layout.buckets[bucket];
  const engine::StateFormat& format = ground_.layout.FormatOf(place);
  for (size_t array = 0; array < format.arrays.size(); ++array) {
    const uint64_t at = format.Byte(array, place.state_offset);
    std::memcpy(writing_->state.data() + at, ground_.memory.state.data() + at,
                format.arrays[array].array.Bytes(place.elements));
  }
  ++saved_;
  --claimed_;
  daemon_.machine()->BucketSaved(bucket);
  if (saved_ == ground_.buckets() || (given_up_ && claimed_ == 0)) return End();
  daemon_.After([this, number] { Claim(number); });
}

void CheckpointWriter::End() {
  const bool whole = saved_ == ground_.buckets();
  ground_.log.Add("checkpoint", whole ? "is whole" : "is given up");
  if (whole) whole_.push_back(*std::move(writing_));
  writing_.reset();
  daemon_.machine()->EndSnapshot();
}

void CheckpointWriter::Stop() {
  stopped_ = true;
  if (request_ && daemon_.alive()) daemon_.machine()->CancelSnapshot(*request_);
  request_.reset();
}

void CheckpointWriter::Die() {
  request_.reset();
  writing_.reset();
}

}  // namespace superoffload::faults
