// The instruction sets that vector sources are compiled for, one object each (superoffload_add_per_isa in
// CMakeLists.txt), and the choice among them at run time.
#ifndef SUPEROFFLOAD_KERNELS_TARGETS_H_
#define SUPEROFFLOAD_KERNELS_TARGETS_H_

#include <vector>

namespace superoffload::kernels {

// The fastest first. X gets the name of the target, then what else is given.
#if defined(__x86_64__)
#define SUPEROFFLOAD_FOR_EACH_TARGET(X, ...) X(Avx512, __VA_ARGS__) X(Avx2, __VA_ARGS__)
#elif defined(__aarch64__)
#define SUPEROFFLOAD_FOR_EACH_TARGET(X, ...) X(Sve2Fixed128, __VA_ARGS__) X(Sve2, __VA_ARGS__) X(Neon, __VA_ARGS__)
#else
#define SUPEROFFLOAD_FOR_EACH_TARGET(X, ...)
#endif

enum class Target { kAvx512, kAvx2, kSve2Fixed128, kSve2, kNeon };

bool MachineRuns(Target target);

#define SUPEROFFLOAD_DECLARE_TABLE(target, Type, Suffix) extern const Type k##target##Suffix;
#define SUPEROFFLOAD_ADD_TABLE(target, Type, Suffix) \
  if (MachineRuns(Target::k##target)) tables.push_back(&k##target##Suffix);

// Defines `function`, which returns the tables k<Target><Suffix> that this machine can run, the fastest first, and
// kScalar<Suffix> last.
#define SUPEROFFLOAD_SUPPORTED_TABLES(function, Type, Suffix)            \
  SUPEROFFLOAD_FOR_EACH_TARGET(SUPEROFFLOAD_DECLARE_TABLE, Type, Suffix) \
  const std::vector<const Type*>& function() {                           \
    static const std::vector<const Type*> supported = [] {               \
      std::vector<const Type*> tables;                                   \
      SUPEROFFLOAD_FOR_EACH_TARGET(SUPEROFFLOAD_ADD_TABLE, Type, Suffix) \
      tables.push_back(&kScalar##Suffix);                                \
      return tables;                                                     \
    }();                                                                 \
    return supported;                                                    \
  }

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_TARGETS_H_
