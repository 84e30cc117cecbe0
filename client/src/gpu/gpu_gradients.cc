// A stage's event is recorded anew only after the stage was packed, and each copy into the stage waits for the latest:
// so no copy overtakes the kernel that reads what was there before.
#include "client/src/gpu/gpu_gradients.h"

#include <algorithm>
#include <set>
#include <utility>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {
namespace {

kernels::CudaStream ToStream(StreamNumber number) { return reinterpret_cast<kernels::CudaStream>(number); }

}  // namespace

using kernels::CudaPointer;
using kernels::CudaStream;
using kernels::CurrentDevice;

GpuGradients::GpuGradients(const ModelLayout* layout, StepPlane* steps, GpuPlane* plane)
    : layout_(*layout), steps_(*steps), plane_(*plane), device_(plane->device()), scalars_(plane->device()) {}

GpuGradients::~GpuGradients() {
  WaitPacked();
  const CurrentDevice current(*device_);
  for (const auto& [stream, copied] : copied_) driver().EventSynchronize(copied.get());
  copied_.clear();  // while the device is current
  for (auto& [bucket, stage] : open_) driver().MemFree(stage.memory);
  for (StageMemory& stage : free_) driver().MemFree(stage.memory);
  open_.clear();
  free_.clear();
}

void GpuGradients::WaitPacked() const {
  if (plane_.ended()) return;  // so it has been
  const CurrentDevice current(*device_);
  driver().StreamSynchronize(plane_.pack_stream());
}

const void* GpuGradients::Where(const GradientPiece& piece, const GradientSource& source, uint32_t) const {
  return source.stays == GradientSource::Stays::kUntilOver ? piece.data : nullptr;
}

Status GpuGradients::Check(const GradientSource& source) const {
  if (source.stream) return plane_.CheckStream(ToStream(*source.stream));
  return Error(
      Code::kFailedPrecondition,
      "the optimizer's parameters are on a GPU, but a gradient is in the host's memory: compute it on the GPU, "
      "or move it there");
}

Status GpuGradients::Take(std::span<const GradientPiece> pieces, const GradientSource& source, uint32_t,
                          std::span<uint64_t> digests) {
  std::ranges::fill(digests, 0);
  for (const GradientPiece& piece : pieces) {
    Status status;
    layout_.ForEachPart(piece.parameter, piece.first, piece.elements, [&](uint32_t bucket, const BucketPart& part) {
      if (status.ok()) status = TakePart(bucket, part, piece, source);
    });
    if (!status.ok()) return status;
  }
  // What is packed later waits for what was staged so far.
  return source.stays == GradientSource::Stays::kNot ? plane_.PackAfter(ToStream(*source.stream)) : Status{};
}

Status GpuGradients::AddUp(std::span<const GradientPiece> pieces, const GradientSource& source,
                           std::vector<uint32_t>* left) {
  if (source.stays == GradientSource::Stays::kNot) {
    return Error(Code::kUnimplemented,
                 "gradients of several passes are added up where they stay until they were packed");
  }
  for (const GradientPiece& piece : pieces) {
    if (piece.data == nullptr) return Error(Code::kInvalidArgument, "a pass that more follow brings gradients only");
    std::vector<uint32_t> again, complete;
    layout_.ForEachPart(piece.parameter, piece.first, piece.elements, [&](uint32_t bucket, const BucketPart& part) {
      if (sums_[bucket].pass.contains(part.place)) again.push_back(bucket);
    });
    for (const uint32_t bucket : again) {
      if (Status status = PackPass(bucket, left); !status.ok()) return status;
    }
    const auto data = reinterpret_cast<CudaPointer>(piece.data);
    layout_.ForEachPart(piece.parameter, piece.first, piece.elements, [&](uint32_t bucket, const BucketPart& part) {
      const uint64_t skipped = (part.first - piece.first) * kernels::DTypeBytes(piece.dtype);
      Sum& sum = sums_[bucket];
      sum.pass[part.place] = {{data + skipped, part.place, part.elements}, piece.dtype, ToStream(*source.stream)};
      sum.elements += part.elements;
      if (sum.elements == layout_.elements(bucket)) complete.push_back(bucket);
    });
    for (const uint32_t bucket : complete) {
      if (Status status = PackPass(bucket, left); !status.ok()) return status;
    }
  }
  return {};
}

// Whatever has come of it.
Status GpuGradients::PackPass(uint32_t bucket, std::vector<uint32_t>* left) {
  Sum& sum = sums_[bucket];
  const std::map<uint64_t, Tensor> pass = std::exchange(sum.pass, {});
  sum.elements = 0;
  std::vector<Tensor> tensors;
  for (const auto& [place, tensor] : pass) tensors.push_back(tensor);
  superoffload_ring_entry nobody{};
  nobody.index = bucket;
  if (Status status = Pack(nobody, std::move(tensors), {.adds = sum.begun, .last = false}); !status.ok()) return status;
  sum.begun = true;
  for (const BucketPart& part : layout_.parts(bucket)) {
    if (pass.contains(part.place) && !IsInPass(part.parameter)) left->push_back(part.parameter);
  }
  return {};
}

bool GpuGradients::IsInPass(uint32_t parameter) const {
  bool found = false;
  const uint64_t elements = layout_.parameter(parameter).elements;
  layout_.ForEachPart(parameter, 0, elements, [&](uint32_t bucket, const BucketPart& part) {
    const auto sum = sums_.find(bucket);
    found = found || (sum != sums_.end() && sum->second.pass.contains(part.place));
  });
  return found;
}

Status GpuGradients::TakePart(uint32_t bucket, const BucketPart& part, const GradientPiece& piece,
                              const GradientSource& source) {
  if (piece.data == nullptr) {
    if (const auto sum = sums_.find(bucket); sum != sums_.end() && (sum->second.begun || !sum->second.pass.empty())) {
      return {};
    }
    return Error(Code::kFailedPrecondition, "no pass has brought a gradient of ",
                 layout_.parameter(piece.parameter).name, " in this step; hand it over, or say that it is absent");
  }
  const uint64_t bytes = kernels::DTypeBytes(piece.dtype);
  CudaPointer data = reinterpret_cast<CudaPointer>(piece.data) + (part.first - piece.first) * bytes;
  if (source.stays == GradientSource::Stays::kNot) {
    if (bytes > kernels::DTypeBytes(layout_.parameter(piece.parameter).gradient_dtype)) {
      return Error(Code::kFailedPrecondition, "the gradient of ", layout_.parameter(piece.parameter).name, " is ",
                   DTypeName(piece.dtype), ", which is wider than the optimizer was built for");
    }
    if (Status status = CopyToStage(bucket, part, bytes, data, ToStream(*source.stream), &data); !status.ok()) {
      return status;
    }
  }
  tensors_[bucket].push_back({{data, part.place, part.elements}, piece.dtype, ToStream(*source.stream)});
  return {};
}

Status GpuGradients::AllocateStage(StageMemory* stage) {
  if (Status status = FromCuda(kernels::MakeEvent(*device_, &stage->packed)); !status.ok()) return status;
  return FromCuda(driver().Status(driver().MemAlloc(&stage->memory, layout_.most_gradient_bytes()),
                                  "allocating GPU memory for gradients of a bucket (XLA_PYTHON_CLIENT_MEM_FRACTION "
                                  "says how much JAX leaves)"));
}

Status GpuGradients::OpenStage(uint32_t bucket, StageMemory** stage) {
  auto found = open_.find(bucket);
  if (found == open_.end()) {
    StageMemory opened;
    if (!free_.empty()) {
      opened = std::move(free_.front());
      free_.pop_front();
    } else if (Status status = AllocateStage(&opened); !status.ok()) {
      return status;
    }
    found = open_.emplace(bucket, std::move(opened)).first;
  }
  *stage = &found->second;
  return {};
}

Status GpuGradients::CopyToStage(uint32_t bucket, const BucketPart& part, uint64_t element_bytes, CudaPointer from,
                                 CudaStream stream, CudaPointer* staged) {
  const CurrentDevice current(*device_);
  StageMemory* stage = nullptr;
  if (Status status = OpenStage(bucket, &stage); !status.ok()) return status;
  if (Status status = FromCuda(driver().Status(driver().StreamWaitEvent(stream, stage->packed.get(), 0),
                                               "waiting for a gradient to be packed"));
      !status.ok()) {
    return status;
  }
  *staged = stage->memory + part.place * element_bytes;
  return FromCuda(driver().Status(driver().MemcpyDtoDAsync(*staged, from, part.elements * element_bytes, stream),
                                  "copying a gradient"));
}

Status GpuGradients::Submit(const superoffload_ring_entry& entry) {
  std::vector<Tensor> tensors;
  if (const auto found = tensors_.find(entry.index); found != tensors_.end()) {
    tensors = std::move(found->second);
    tensors_.erase(found);
  }
  const auto sum = sums_.find(entry.index);
  if (sum != sums_.end() && !sum->second.pass.empty()) {
    std::vector<uint32_t> unused;
    if (Status status = PackPass(entry.index, &unused); !status.ok()) return status;
  }
  const bool adds = sum != sums_.end() && sum->second.begun;
  if (Status status = Pack(entry, std::move(tensors), {.adds = adds}); !status.ok()) return status;
  return ReleaseStage(entry.index);
}

Status GpuGradients::Pack(const superoffload_ring_entry& entry, std::vector<Tensor> tensors, Pass pass) {
  kernels::DType dtype = layout_.parameter(layout_.parts(entry.index).front().parameter).gradient_dtype;
  CudaStream stream = plane_.pack_stream();  // of a bucket that nobody has brought
  if (!tensors.empty()) {
    dtype = tensors.back().dtype;
    stream = tensors.back().stream;
  }
  std::set<CudaStream> others;  // branches of a model that ran beside each other
  for (const Tensor& tensor : tensors) {
    if (tensor.stream != stream) others.insert(tensor.stream);
    if (tensor.dtype == dtype) continue;
    return Error(Code::kUnimplemented, "gradients of one bucket are ", DTypeName(dtype), " and ",
                 DTypeName(tensor.dtype), "; use one dtype");
  }
  for (const CudaStream other : others) {
    if (Status status = plane_.PackAfter(other); !status.ok()) return status;
  }
  std::ranges::sort(tensors, {}, [](const Tensor& tensor) { return tensor.tensor.first; });
  std::vector<BucketTensor> joined;
  for (const auto& [tensor, itsdtype, itsstream] : tensors) {
    if (!joined.empty() && joined.back().first + joined.back().elements == tensor.first &&
        joined.back().data + joined.back().elements * kernels::DTypeBytes(dtype) == tensor.data) {
      joined.back().elements += tensor.elements;
    } else {
      joined.push_back(tensor);
    }
  }
  return plane_.SubmitGradient(entry, joined, dtype, stream, pass);
}

// The pack stream has been given what uses the bucket's stage.
Status GpuGradients::ReleaseStage(uint32_t bucket) {
  const auto stage = open_.find(bucket);
  if (stage == open_.end()) return {};
  const CurrentDevice current(*device_);
  const Status status = FromCuda(
      driver().Status(driver().EventRecord(stage->second.packed.get(), plane_.pack_stream()), "recording an event"));
  free_.push_back(std::move(stage->second));
  open_.erase(stage);
  return status;
}

void GpuGradients::Drop() {
  tensors_.clear();
  sums_.clear();
  while (!open_.empty()) {
    const uint32_t bucket = open_.begin()->first;
    if (plane_.ended()) {
      free_.push_back(std::move(open_.begin()->second));
      open_.erase(bucket);
    } else {
      (void)ReleaseStage(bucket);  // an error is one of the driver's, which every later call has
    }
  }
}

Status GpuGradients::Publish(std::span<void* const> to, std::optional<StreamNumber> stream) {
  for (uint32_t bucket = static_cast<uint32_t>(layout_.bucket_count()); bucket-- > 0;) {
    if (plane_.unit(bucket) != 0) continue;
    if (Status status = steps_.WaitLatest(bucket, plane_.resident(bucket), std::nullopt); !status.ok()) return status;
    if (Status status = plane_.StreamWaits(bucket, ToStream(*stream)); !status.ok()) return status;
  }
  for (size_t i = 0; i < layout_.parameter_count(); ++i) {
    if (to[i] == nullptr) continue;
    if (plane_.unit(layout_.parameter(i).first_bucket) != 0) {
      return Error(Code::kFailedPrecondition, "parameter ", layout_.parameter(i).name,
                   " streams, and is on the GPU only while its layer computes; end steps outside of jit (finish())");
    }
    if (Status status = CopyParameter(i, to[i], ToStream(*stream)); !status.ok()) return status;
  }
  return plane_.PackAfter(ToStream(*stream));  // the step that changes them ends after these copies
}

Status GpuGradients::ReadStreamed(std::span<const int64_t> parameters, std::span<void* const> to, CudaStream stream) {
  uint32_t read = 0;
  for (const int64_t parameter : parameters) {
    const uint32_t unit = plane_.unit(layout_.parameter(parameter).first_bucket);
    if (unit == 0) {
      return Error(Code::kFailedPrecondition, "parameter ", layout_.parameter(parameter).name, " does not stream");
    }
    if (unit != read) {
      if (Status status = plane_.ReadUnit(unit, stream); !status.ok()) return status;
      read = unit;
    }
    if (Status status = CopyParameter(parameter, to[parameter], stream); !status.ok()) return status;
  }
  return {};
}

Status GpuGradients::CopyParameter(size_t index, void* to, CudaStream stream) {
  const ParameterPlace& place = layout_.parameter(index);
  return Copy(to, plane_.parameters() + place.gpu_offset, place.bytes(), stream);
}

Status GpuGradients::EndAfter(StreamNumber stream) { return plane_.PackAfter(ToStream(stream)); }

Status GpuGradients::Read(std::span<const SmallCopy> copies, CudaStream stream) {
  if (Status status = plane_.CheckStream(stream); !status.ok()) return status;
  return scalars_.Read(copies, stream);
}

Status GpuGradients::Write(std::span<const SmallCopy> copies, CudaStream stream) {
  if (Status status = plane_.CheckStream(stream); !status.ok()) return status;
  return scalars_.Write(copies, stream);
}

Status GpuGradients::Copy(void* to, CudaPointer from, uint64_t bytes, CudaStream stream) {
  if (Status status = plane_.CheckStream(stream); !status.ok()) return status;
  const CurrentDevice current(*device_);
  kernels::OwnedEvent& copied = copied_[stream];
  kernels::CudaStatus status = copied.get() == nullptr ? MakeEvent(*device_, &copied) : kernels::CudaStatus{};
  if (status.ok()) {
    status = driver().Status(driver().MemcpyDtoDAsync(reinterpret_cast<CudaPointer>(to), from, bytes, stream),
                             "copying what XLA has asked for");
  }
  if (status.ok()) status = driver().Status(driver().EventRecord(copied.get(), stream), "recording an event");
  return FromCuda(status);
}

}  // namespace superoffload::client
