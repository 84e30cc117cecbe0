#include "server/optimizer/hosted_memory.h"

#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/record.h"
#include "server/memory/crc32.h"

namespace superoffload::optimizer {
namespace {

struct Part {
  const char* name;
  memory::SharedMemory HostedMemory::* memory;
  bool trainers_write = false;
};

constexpr Part kParts[] = {{"superoffload-parameters", &HostedMemory::parameters, true},
                           {"superoffload-gradients", &HostedMemory::gradients, true},
                           {"superoffload-state", &HostedMemory::state},
                           {"superoffload-record", &HostedMemory::record},
                           {"superoffload-description", &HostedMemory::description}};

// Before the text of each of the two copies.
struct DescriptionHeader {
  uint64_t sequence;  // 0: never written
  uint64_t bytes;
  uint64_t crc32;  // of what is above and of the text
};

// What a description may grow by.
constexpr size_t kDescriptionRoom = 16 << 10;

uint64_t DescriptionCrc32(const DescriptionHeader& header, const char* text) {
  return memory::Crc32(text, header.bytes, memory::Crc32(&header, offsetof(DescriptionHeader, crc32)));
}

struct Copy {
  DescriptionHeader header;
  const char* text;
  bool whole;
};

Copy CopyOf(const memory::SharedMemory& description, uint64_t index) {
  const size_t bytes = description.bytes() / 2;
  const std::byte* const at = description.data() + index * bytes;
  Copy copy{{}, reinterpret_cast<const char*>(at) + sizeof(DescriptionHeader), false};
  std::memcpy(&copy.header, at, sizeof(copy.header));
  copy.whole = copy.header.sequence != 0 && copy.header.bytes <= bytes - sizeof(DescriptionHeader) &&
               copy.header.crc32 == DescriptionCrc32(copy.header, copy.text);
  return copy;
}

// The newer whole copy; one that is not whole when there is none.
Copy Newest(const memory::SharedMemory& description) {
  const Copy first = CopyOf(description, 0), second = CopyOf(description, 1);
  return !first.whole || (second.whole && second.header.sequence > first.header.sequence) ? second : first;
}

// Of messages, a parameter or bucket takes about this much beside its name and shape.
constexpr uint64_t kMessageBytes = 256;

// Of a dimension: in the spec, in two copies of the description, where a number has up to ten bytes, and in a page of
// the plan.
constexpr uint64_t kDimensionBytes = sizeof(uint64_t) + 2 * 10 + sizeof(uint64_t);

// The spec, the plan, the description in two copies, and a page of the plan for those who ask.
uint64_t MetadataBytes(const engine::Layout& layout, const engine::OptimizerSpec& spec) {
  constexpr uint64_t kCopies = 4;
  const uint64_t group_bytes = spec.algorithm->scalars.size() * (sizeof(double) + kMessageBytes / 8);
  uint64_t bytes = 2 * (sizeof(DescriptionHeader) + kDescriptionRoom);
  bytes += kCopies * spec.groups.size() * (sizeof(spec.groups[0]) + group_bytes);
  bytes += layout.parts.capacity() * sizeof(layout.parts[0]);
  bytes += layout.buckets.size() * (sizeof(layout.buckets[0]) + kMessageBytes);
  bytes += layout.placements.size() * (sizeof(layout.placements[0]) + kMessageBytes);
  for (const engine::ParameterSpec& parameter : spec.parameters) {
    bytes += sizeof(parameter) + kMessageBytes;
    const size_t numbers = parameter.shape.size() + parameter.global_shape.size() + parameter.global_offset.size();
    bytes += kCopies * parameter.name.size() + numbers * kDimensionBytes;
  }
  return bytes;
}

}  // namespace

// A file of no bytes cannot be mapped.
uint64_t HostedMemory::ParametersBytes(const engine::Layout& layout) {
  return layout.in_place ? 1 : layout.parameters_bytes;
}

memory::MemoryUse HostedMemory::Use(const engine::Layout& layout, const engine::OptimizerSpec& spec) {
  return {.state_bytes = layout.state_bytes + engine::Record::Bytes(layout),
          .gradients_bytes = layout.gradients_bytes,
          .parameters_bytes = ParametersBytes(layout),
          .metadata_bytes = MetadataBytes(layout, spec),
          .lent_bytes = 0};
}

absl::StatusOr<HostedMemory> HostedMemory::Create(const engine::Layout& layout, const std::string& description,
                                                  const memory::Binding& binding) {
  const size_t bytes[] = {ParametersBytes(layout), layout.gradients_bytes, layout.state_bytes,
                          engine::Record::Bytes(layout),
                          2 * (sizeof(DescriptionHeader) + description.size() + kDescriptionRoom)};
  HostedMemory hosted;
  for (size_t i = 0; i < std::size(kParts); ++i) {
    memory::Binding bound = binding;
    bound.from_pool = !kParts[i].trainers_write;
    absl::StatusOr<memory::SharedMemory> created = memory::SharedMemory::Create(kParts[i].name, bytes[i], bound);
    if (!created.ok()) return created.status();
    hosted.*kParts[i].memory = *std::move(created);
  }
  if (absl::Status status = hosted.Describe(description); !status.ok()) return status;
  return hosted;
}

absl::StatusOr<HostedMemory> HostedMemory::Open(std::vector<memory::FileDescriptor>& fds) {
  std::map<std::string, memory::SharedMemory> opened;
  absl::Status status;
  for (memory::FileDescriptor& fd : fds) {
    absl::StatusOr<std::pair<std::string, memory::SharedMemory>> memory = memory::SharedMemory::Open(fd);
    if (!memory.ok()) {
      status = memory.status();
    } else if (opened.contains(memory->first)) {
      fd = memory->second.Release();
      status = absl::DataLossError(absl::StrCat(memory->first, " is there twice"));
    } else {
      opened.insert(*std::move(memory));
    }
  }
  for (const Part& part : kParts) {
    if (!opened.contains(part.name)) status.Update(absl::DataLossError(absl::StrCat(part.name, " is missing")));
  }
  if (status.ok()) {
    HostedMemory hosted;
    for (const Part& part : kParts) hosted.*part.memory = std::move(opened[part.name]);
    return hosted;
  }
  std::erase_if(fds, [](const memory::FileDescriptor& fd) { return !fd.valid(); });
  for (auto& [name, memory] : opened) fds.push_back(memory.Release());
  return status;
}

std::vector<memory::FileDescriptor> HostedMemory::Release() {
  std::vector<memory::FileDescriptor> fds;
  for (const Part& part : kParts) fds.push_back((this->*part.memory).Release());
  return fds;
}

absl::StatusOr<std::string> HostedMemory::Description() const {
  const Copy newest = Newest(description);
  if (!newest.whole) return absl::DataLossError("the description of the optimizer is damaged");
  return std::string(newest.text, newest.header.bytes);
}

absl::Status HostedMemory::Describe(const std::string& text) const {
  const size_t bytes = description.bytes() / 2;
  if (text.size() > bytes - sizeof(DescriptionHeader)) {
    return absl::ResourceExhaustedError("the optimizer's policies have grown too long; shorten their directory");
  }
  const Copy newest = Newest(description);
  DescriptionHeader header{newest.whole ? newest.header.sequence + 1 : 1, text.size(), 0};
  header.crc32 = DescriptionCrc32(header, text.data());
  std::byte* const at = description.data() + header.sequence % 2 * bytes;
  std::memcpy(at + sizeof(header), text.data(), text.size());
  std::memcpy(at, &header, sizeof(header));
  return absl::OkStatus();
}

std::map<int, uint64_t> HostedMemory::BytesByNode() const {
  std::map<int, uint64_t> by_node;
  for (const Part& part : kParts) {
    for (const auto& [node, bytes] : (this->*part.memory).bytes_by_node()) by_node[node] += bytes;
  }
  return by_node;
}

absl::Status HostedMemory::CheckSizes(const engine::Layout& layout) const {
  if (parameters.bytes() < ParametersBytes(layout) || gradients.bytes() < layout.gradients_bytes ||
      state.bytes() < layout.state_bytes || record.bytes() < engine::Record::Bytes(layout)) {
    return absl::DataLossError("the memory of the optimizer is smaller than its plan");
  }
  return absl::OkStatus();
}

absl::Status HostedMemory::Check(const engine::Layout& layout) const {
  if (absl::Status status = CheckSizes(layout); !status.ok()) return status;
  return engine::Record(record.data(), layout).Check();
}

}  // namespace superoffload::optimizer
