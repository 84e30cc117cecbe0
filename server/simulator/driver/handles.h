// What a driver gives its caller instead of pointers. No handle is ever used again: who uses one of what is destroyed
// learns of it (400), where hardware may take another for it, or end the process.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_HANDLES_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_HANDLES_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace superoffload::simulator {

inline std::atomic<uintptr_t> last_handle = 0x5c0000000000;  // of any kind

// Thread-safe.
template <typename T>
class Handles {
 public:
  // Those of this kind. Never destroyed: streams that are left run until the program ends.
  static Handles& Get() {
    static auto* const handles = new Handles;
    return *handles;
  }

  // `Handle`: a pointer of the driver's.
  template <typename Handle>
  Handle Add(std::shared_ptr<T> object) {
    const uintptr_t handle = last_handle += 0x100;
    std::lock_guard lock(mu_);
    objects_.emplace(handle, std::move(object));
    return reinterpret_cast<Handle>(handle);
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
  mutable std::mutex mu_;
  std::map<uintptr_t, std::shared_ptr<T>> objects_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_DRIVER_HANDLES_H_
