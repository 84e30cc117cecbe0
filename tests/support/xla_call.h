// A call of an FFI handler as XLA on a GPU makes it: operands and results in GPU memory, and a stream.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_XLA_CALL_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_XLA_CALL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "superoffload/superoffload.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};
struct XLA_FFI_ExecutionContext {
  void* stream;
};

namespace superoffload::test {

class XlaCall {
 public:
  explicit XlaCall(void* stream) : context_{stream} {}

  XlaCall& Attribute(const std::string& name, int64_t value) {
    numbers_.push_back({value});
    scalars_.push_back({XLA_FFI_DataType_S64, numbers_.back().data()});
    attributes_[name] = {XLA_FFI_AttrType_SCALAR, &scalars_.back()};
    return *this;
  }
  XlaCall& Attribute(const std::string& name, std::vector<int64_t> values) {
    numbers_.push_back(std::move(values));
    arrays_.push_back({XLA_FFI_DataType_S64, numbers_.back().size(), numbers_.back().data()});
    attributes_[name] = {XLA_FFI_AttrType_ARRAY, &arrays_.back()};
    return *this;
  }
  XlaCall& Real(const std::string& name, double value) {
    reals_.push_back(value);
    scalars_.push_back({XLA_FFI_DataType_F64, &reals_.back()});
    attributes_[name] = {XLA_FFI_AttrType_SCALAR, &scalars_.back()};
    return *this;
  }
  // One dimension each.
  XlaCall& Operand(XLA_FFI_DataType dtype, uint64_t elements, uint64_t pointer) {
    operands_.push_back(Buffer(dtype, elements, pointer));
    return *this;
  }
  XlaCall& Result(XLA_FFI_DataType dtype, uint64_t elements, uint64_t pointer) {
    results_.push_back(Buffer(dtype, elements, pointer));
    return *this;
  }

  // The error that it ends with; empty: none.
  std::string Run(const char* handler) {
    XLA_FFI_Api api = Api();
    std::vector<XLA_FFI_ArgType> operand_types(operands_.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(results_.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> types;
    std::deque<XLA_FFI_ByteSpan> spans;
    std::vector<XLA_FFI_ByteSpan*> names;
    std::vector<void*> values;
    for (const auto& [name, attribute] : attributes_) {
      spans.push_back({name.data(), name.size()});
      names.push_back(&spans.back());
      types.push_back(attribute.first);
      values.push_back(attribute.second);
    }
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.ctx = &context_;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands_.size()), operand_types.data(),
                  operands_.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()), result_types.data(),
                  results_.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                   nullptr,
                   static_cast<int64_t>(values.size()),
                   types.data(),
                   names.data(),
                   values.data()};
    return Call(handler, &frame);
  }

  // What XLA may do with the handler: XLA_FFI_HANDLER_TRAITS_..., or ~0: it does not say.
  static XLA_FFI_Handler_Traits Traits(const char* handler) {
    XLA_FFI_Api api = Api();
    XLA_FFI_Metadata metadata{};
    metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
    XLA_FFI_Metadata_Extension extension{};
    extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr};
    extension.metadata = &metadata;
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.extension_start = &extension.extension_base;
    frame.api = &api;
    return Call(handler, &frame).empty() ? metadata.traits : ~XLA_FFI_Handler_Traits{0};
  }

 private:
  static XLA_FFI_Api Api() {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
    api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = args->ctx->stream;
      return nullptr;
    };
    return api;
  }

  static std::string Call(const char* handler, XLA_FFI_CallFrame* frame) {
    void* function = nullptr;
    if (superoffload_xla_handler(handler, "cuda", &function) != 0) return superoffload_last_error();
    XLA_FFI_Error* const error = reinterpret_cast<XLA_FFI_Handler*>(function)(frame);
    std::string message = error == nullptr ? "" : error->message;
    delete error;
    return message;
  }

  XLA_FFI_Buffer* Buffer(XLA_FFI_DataType dtype, uint64_t elements, uint64_t pointer) {
    numbers_.push_back({static_cast<int64_t>(elements)});
    buffers_.push_back(
        {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, reinterpret_cast<void*>(pointer), 1, numbers_.back().data()});
    return &buffers_.back();
  }

  XLA_FFI_ExecutionContext context_;
  std::deque<std::vector<int64_t>> numbers_;
  std::deque<double> reals_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> attributes_;  // sorted, as XLA gives them
  std::vector<void*> operands_, results_;
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_XLA_CALL_H_
