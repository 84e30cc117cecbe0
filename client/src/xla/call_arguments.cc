#include "client/src/xla/call_arguments.h"

#include <optional>

namespace superoffload::client {

namespace ffi = xla::ffi;

namespace {

std::optional<kernels::DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return kernels::DType::kBFloat16;
    case ffi::DataType::F16:
      return kernels::DType::kFloat16;
    case ffi::DataType::F32:
      return kernels::DType::kFloat32;
    default:
      return std::nullopt;
  }
}

Status PieceOf(const Trainer& trainer, int64_t parameter, int32_t index, const ffi::AnyBuffer& buffer,
               GradientPiece* piece) {
  if (parameter < 0 || static_cast<size_t>(parameter) >= trainer.layout().parameter_count()) {
    return Error(Code::kInvalidArgument, "parameter ", parameter, " does not exist");
  }
  const ParameterPlace& whole = trainer.layout().parameter(parameter);
  if (ToDType(buffer.element_type()) != whole.dtype) {
    return Error(Code::kInvalidArgument, "the gradient of ", whole.name, " has another dtype than it");
  }
  const uint64_t elements = buffer.element_count();
  if (index < 0 ? elements != whole.elements
                : elements == 0 || static_cast<uint64_t>(index) >= whole.elements / elements) {
    return Error(Code::kInvalidArgument, "a gradient of ", elements, " elements is not slice ", index, " of ",
                 whole.name, ", which has ", whole.elements, "; pass index= the number of the layer in the stack");
  }
  *piece = {static_cast<uint32_t>(parameter), index < 0 ? 0 : index * elements, elements, buffer.untyped_data(),
            whole.dtype};
  return {};
}

}  // namespace

Status PiecesOf(const Trainer& trainer, CallNumbers parameters, int32_t index, const ffi::RemainingArgs& operands,
                size_t first, std::vector<GradientPiece>* pieces) {
  pieces->resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(first + i);
    if (!buffer.has_value()) return Error(Code::kInvalidArgument, buffer.error().message());
    if (Status status = PieceOf(trainer, parameters[i], index, *buffer, &(*pieces)[i]); !status.ok()) return status;
  }
  return {};
}

Status HandOverCall::Index(const int32_t** index) const {
  if (operands.size() != 1 + passing + parameters.size()) return Error(Code::kInvalidArgument, "wrong operands");
  const auto buffer = operands.get<ffi::AnyBuffer>(0);
  if (!buffer.has_value() || buffer->element_type() != ffi::DataType::S32) {
    return Error(Code::kInvalidArgument, "wrong index");
  }
  *index = static_cast<const int32_t*>(buffer->untyped_data());
  return {};
}

Status HandOverCall::Pieces(const Trainer& trainer, int32_t index, std::vector<GradientPiece>* pieces) const {
  return PiecesOf(trainer, parameters, index, operands, 1 + passing, pieces);
}

Status ParameterResults(const Trainer& trainer, std::span<const int64_t> parameters, ffi::RemainingRets results,
                        std::vector<void*>* to) {
  const size_t count = trainer.layout().parameter_count();
  if (results.size() != parameters.size()) return Error(Code::kInvalidArgument, "wrong results");
  to->assign(count, nullptr);
  for (size_t i = 0; i < results.size(); ++i) {
    const uint64_t parameter = static_cast<uint64_t>(parameters[i]);
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || parameter >= count ||
        (*buffer)->size_bytes() != trainer.layout().parameter(parameter).bytes()) {
      return Error(Code::kInvalidArgument, "wrong results");
    }
    (*to)[parameter] = (*buffer)->untyped_data();
  }
  return {};
}

}  // namespace superoffload::client
