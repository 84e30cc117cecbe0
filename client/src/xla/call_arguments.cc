#include "client/src/xla/call_arguments.h"

namespace superoffload::client {

namespace ffi = xla::ffi;

namespace {

// The number of a DataType of optimizer.proto; 0: there is none.
uint32_t DataTypeNumber(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return 1;
    case ffi::DataType::F16:
      return 2;
    case ffi::DataType::F32:
      return 3;
    default:
      return 0;
  }
}

}  // namespace

Status PieceOf(const PieceSubmitter& submitter, int64_t parameter, int32_t index, const ffi::AnyBuffer& buffer,
               GradientPiece* piece) {
  if (parameter < 0 || static_cast<size_t>(parameter) >= submitter.parameter_count()) {
    return Error(Code::kInvalidArgument, "parameter ", parameter, " does not exist");
  }
  const superoffload_xla_parameter& whole = submitter.parameter(parameter);
  if (DataTypeNumber(buffer.element_type()) != whole.dtype) {
    return Error(Code::kInvalidArgument, "the gradient of ", submitter.name(parameter), " has another dtype than it");
  }
  const uint64_t elements = buffer.element_count();
  if (index < 0 ? elements != whole.elements : elements == 0 || static_cast<uint64_t>(index) >= whole.elements / elements) {
    return Error(Code::kInvalidArgument, "a gradient of ", elements, " elements is not slice ", index, " of ",
                 submitter.name(parameter), ", which has ", whole.elements,
                 "; pass index= the number of the layer in the stack");
  }
  *piece = {static_cast<uint32_t>(parameter), index < 0 ? 0 : index * elements, elements, buffer.untyped_data()};
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

Status HandOverCall::Pieces(const PieceSubmitter& submitter, int32_t index, std::vector<GradientPiece>* pieces) const {
  pieces->resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(1 + passing + i);
    if (!buffer.has_value()) return Error(Code::kInvalidArgument, buffer.error().message());
    if (Status status = PieceOf(submitter, parameters[i], index, *buffer, &(*pieces)[i]); !status.ok()) return status;
  }
  return {};
}

Status ParameterResults(const PieceSubmitter& submitter, ffi::RemainingRets results, std::vector<void*>* to) {
  if (results.size() != submitter.parameter_count()) return Error(Code::kInvalidArgument, "wrong results");
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    const superoffload_xla_parameter& parameter = submitter.parameter(i);
    if (!buffer.has_value() || (*buffer)->size_bytes() != parameter.elements * ElementBytes(parameter.dtype)) {
      return Error(Code::kInvalidArgument, "wrong results");
    }
    to->push_back((*buffer)->untyped_data());
  }
  return {};
}

}  // namespace superoffload::client
