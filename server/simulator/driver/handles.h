// What a driver gives its caller instead of pointers. No handle is ever used again: who uses one of what is destroyed
// learns of it (400), where hardware may take another for it, or end the process.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_HANDLES_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_HANDLES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace superoffload::simulator {

// Thread-safe.
template <typename T>
class Handles {
 public:
  // `first`: of the handles, so that those of other kinds are others.
  explicit Handles(uintptr_t first) : next_(first) {}

  void* Add(std::shared_ptr<T> object) {
    std::lock_guard lock(mu_);
    next_ += kStep;
    objects_.emplace(next_, std::move(object));
    return reinterpret_cast<void*>(next_);
  }

  // Null: there is none.
  std::shared_ptr<T> Find(const void* handle) const {
    std::lock_guard lock(mu_);
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<T> Take(const void* handle) {
    std::lock_guard lock(mu_);
    auto taken = objects_.extract(reinterpret_cast<uintptr_t>(handle));
    return taken.empty() ? nullptr : std::move(taken.mapped());
  }

  std::vector<std::shared_ptr<T>> All() const {
    std::vector<std::shared_ptr<T>> all;
    std::lock_guard lock(mu_);
    for (const auto& [handle, object] : objects_) all.push_back(object);
    return all;
  }

 private:
  static constexpr uintptr_t kStep = 0x100;

  mutable std::mutex mu_;
  uintptr_t next_;
  std::map<uintptr_t, std::shared_ptr<T>> objects_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_HANDLES_H_
