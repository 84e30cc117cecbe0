#include "server/optimizer/hosted_memory.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/record.h"
#include "server/memory/crc32.h"

namespace superoffload::optimizer {
namespace {

struct Part {
  const char* name;
  memory::SharedMemory HostedMemory::*memory;
};

constexpr Part kParts[] = {{"superoffload-parameters", &HostedMemory::parameters},
                           {"superoffload-gradients", &HostedMemory::gradients},
                           {"superoffload-state", &HostedMemory::state},
                           {"superoffload-record", &HostedMemory::record},
                           {"superoffload-description", &HostedMemory::description}};

struct DescriptionHeader {
  uint64_t bytes;
  uint64_t crc32;
};

}  // namespace

memory::MemoryUse HostedMemory::Use(const engine::Layout& layout, size_t groups) {
  return {.state_bytes = layout.state_bytes + engine::Record::Bytes(groups, layout.chunks),
          .gradients_bytes = layout.gradients_bytes,
          .parameters_bytes = layout.parameters_bytes};
}

absl::StatusOr<HostedMemory> HostedMemory::Create(const engine::Layout& layout, size_t groups,
                                                  const std::string& description) {
  const size_t bytes[] = {layout.parameters_bytes, layout.gradients_bytes, layout.state_bytes,
                          engine::Record::Bytes(groups, layout.chunks), sizeof(DescriptionHeader) + description.size()};
  HostedMemory hosted;
  for (size_t i = 0; i < std::size(kParts); ++i) {
    absl::StatusOr<memory::SharedMemory> created = memory::SharedMemory::Create(kParts[i].name, bytes[i]);
    if (!created.ok()) return created.status();
    hosted.*kParts[i].memory = *std::move(created);
  }
  const DescriptionHeader header{description.size(), memory::Crc32(description.data(), description.size())};
  std::memcpy(hosted.description.data(), &header, sizeof(header));
  std::memcpy(hosted.description.data() + sizeof(header), description.data(), description.size());
  return hosted;
}

absl::StatusOr<HostedMemory> HostedMemory::Open(std::vector<memory::FileDescriptor> fds) {
  HostedMemory hosted;
  for (memory::FileDescriptor& fd : fds) {
    absl::StatusOr<std::pair<std::string, memory::SharedMemory>> opened = memory::SharedMemory::Open(std::move(fd));
    if (!opened.ok()) return opened.status();
    for (const Part& part : kParts) {
      if (opened->first == part.name) hosted.*part.memory = std::move(opened->second);
    }
  }
  for (const Part& part : kParts) {
    if ((hosted.*part.memory).data() == nullptr) {
      return absl::DataLossError(absl::StrCat("the memory ", part.name, " is missing"));
    }
  }
  return hosted;
}

absl::StatusOr<std::string> HostedMemory::Description() const {
  DescriptionHeader header;
  std::memcpy(&header, description.data(), sizeof(header));
  const char* const text = reinterpret_cast<const char*>(description.data()) + sizeof(header);
  if (header.bytes > description.bytes() - sizeof(header) || header.crc32 != memory::Crc32(text, header.bytes)) {
    return absl::DataLossError("the description of the optimizer is damaged");
  }
  return std::string(text, header.bytes);
}

absl::Status HostedMemory::Check(const engine::Layout& layout, size_t groups) const {
  if (parameters.bytes() < layout.parameters_bytes || gradients.bytes() < layout.gradients_bytes ||
      state.bytes() < layout.state_bytes || record.bytes() < engine::Record::Bytes(groups, layout.chunks)) {
    return absl::DataLossError("the memory of the optimizer is smaller than its plan");
  }
  return engine::Record(record.data(), groups, layout.chunks).Check();
}

}  // namespace superoffload::optimizer
