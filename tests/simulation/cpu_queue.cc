#include "tests/simulation/cpu_queue.h"

#include <utility>

#include "kernels/base/check.h"

namespace superoffload::simulator {

void CpuQueue::Run(Task task) {
  SUPEROFFLOAD_CHECK(task.bytes > 0 && task.seconds > 0);
  tasks_.push_back(std::move(task));
  if (tasks_.size() == 1) Begin();
}

void CpuQueue::Begin() {
  begun_ = time_->now();
  time_->After(tasks_.front().delay, [this] {
    const Task& task = tasks_.front();
    host_memory_->Start(task.bytes, task.bytes / task.seconds, [this] { Finish(); });
  });
}

void CpuQueue::Finish() {
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  busy_seconds_ += time_->now() - begun_;
  if (timeline_ != nullptr) timeline_->Add(Lane::kCpu, std::move(task.name), begun_ + task.delay, time_->now());
  if (!tasks_.empty()) Begin();
  task.done();
}

}  // namespace superoffload::simulator
