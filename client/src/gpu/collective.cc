#include "client/src/gpu/collective.h"

#include <dlfcn.h>

#include <string>
#include <utility>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {
namespace {

using kernels::CudaPointer;
using kernels::CudaStream;
using kernels::DType;

// nccl.h.
constexpr int kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9;
constexpr int kSum = 0, kAverage = 4;

// The library's functions; each returns 0 or an ncclResult_t.
struct Nccl {
  int (*GetUniqueId)(superoffload_collective_id* id);
  int (*CommInitRank)(NcclCommunicator** communicator, int ranks, superoffload_collective_id id, int rank);
  int (*CommDestroy)(NcclCommunicator* communicator);
  int (*ReduceScatter)(const void* from, void* to, size_t elements, int dtype, int operation,
                       NcclCommunicator* communicator, CudaStream stream);
  int (*AllGather)(const void* from, void* to, size_t elements, int dtype, NcclCommunicator* communicator,
                   CudaStream stream);
  const char* (*GetErrorString)(int result);
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

Status LoadOnce(Nccl* nccl) {
  void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Error(Code::kUnavailable, "there is no NCCL (libnccl.so.2); install it, or reduce gradients yourself");
  }
  const bool found =
      Find(library, "ncclGetUniqueId", &nccl->GetUniqueId) && Find(library, "ncclCommInitRank", &nccl->CommInitRank) &&
      Find(library, "ncclCommDestroy", &nccl->CommDestroy) &&
      Find(library, "ncclReduceScatter", &nccl->ReduceScatter) && Find(library, "ncclAllGather", &nccl->AllGather) &&
      Find(library, "ncclGetErrorString", &nccl->GetErrorString);
  return found ? Status{} : Error(Code::kUnavailable, "NCCL lacks functions of version 2; update it");
}

Status Load(const Nccl** nccl) {
  static Nccl loaded{};
  static const Status status = LoadOnce(&loaded);
  *nccl = &loaded;
  return status;
}

Status Check(const Nccl& nccl, int result, const std::string& call) {
  if (result == 0) return {};
  return Error(Code::kInternal, call, ": ", nccl.GetErrorString(result), " (NCCL error ", result,
               "); run again with NCCL_DEBUG=INFO to see why");
}

int Number(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return kBfloat16;
    case DType::kFloat16:
      return kFloat16;
    case DType::kFloat32:
      return kFloat32;
    case DType::kUInt8:
      break;
  }
  return -1;
}

}  // namespace

Status MakeCollectiveId(superoffload_collective_id* id) {
  const Nccl* nccl = nullptr;
  if (Status status = Load(&nccl); !status.ok()) return status;
  return Check(*nccl, nccl->GetUniqueId(id), "naming a communicator");
}

Status Collective::Create(int ordinal, const superoffload_collective_id& id, uint32_t ranks, uint32_t rank,
                          std::unique_ptr<Collective>* collective) {
  if (ranks == 0 || rank >= ranks) {
    return Error(Code::kInvalidArgument, "rank ", rank, " of ", ranks, " ranks; ranks count from 0");
  }
  const Nccl* nccl = nullptr;
  if (Status status = Load(&nccl); !status.ok()) return status;
  std::shared_ptr<const kernels::GpuDevice> device;
  if (Status status = FromCuda(kernels::GpuDevice::Open(ordinal, &device)); !status.ok()) return status;
  std::unique_ptr<Collective> created(new Collective(std::move(device)));
  const kernels::CurrentDevice current(*created->device_);
  if (Status status =
          Check(*nccl, nccl->CommInitRank(&created->communicator_, static_cast<int>(ranks), id, static_cast<int>(rank)),
                "joining the communicator");
      !status.ok()) {
    return status;
  }
  *collective = std::move(created);
  return {};
}

Collective::~Collective() {
  const Nccl* nccl = nullptr;
  if (communicator_ == nullptr || !Load(&nccl).ok()) return;
  const kernels::CurrentDevice current(*device_);
  nccl->CommDestroy(communicator_);
}

Status Collective::ReduceScatter(CudaPointer from, CudaPointer to, uint64_t elements, DType dtype, bool average,
                                 CudaStream stream) const {
  const Nccl* nccl = nullptr;
  if (Status status = Load(&nccl); !status.ok()) return status;
  const kernels::CurrentDevice current(*device_);
  return Check(*nccl,
               nccl->ReduceScatter(reinterpret_cast<const void*>(from), reinterpret_cast<void*>(to), elements,
                                   Number(dtype), average ? kAverage : kSum, communicator_, stream),
               "reducing and scattering");
}

Status Collective::AllGather(CudaPointer from, CudaPointer to, uint64_t elements, DType dtype,
                             CudaStream stream) const {
  const Nccl* nccl = nullptr;
  if (Status status = Load(&nccl); !status.ok()) return status;
  const kernels::CurrentDevice current(*device_);
  return Check(*nccl,
               nccl->AllGather(reinterpret_cast<const void*>(from), reinterpret_cast<void*>(to), elements,
                               Number(dtype), communicator_, stream),
               "gathering");
}

}  // namespace superoffload::client
