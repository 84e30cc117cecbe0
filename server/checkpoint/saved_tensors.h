// The tensors of checkpoints and of safetensors files, put together from the slices that ranks have written. A slice is
// a box of a tensor; boxes of one tensor are disjoint, or the same where ranks have replicas.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SAVED_TENSORS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SAVED_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/box.h"
#include "server/checkpoint/file_pool.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/read_scope.h"
#include "server/checkpoint/run_directory.h"
#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {

class SavedTensors {
 public:
  struct SavedFile {
    PooledFile file;
    std::optional<uint32_t> crc32;  // that its index has
  };
  struct Slice {
    const SavedFile* file;
    uint64_t offset;  // of its first byte in the file
    std::string dtype;
    Box box;
    uint64_t steps = 0;  // committed ones of its parameter
    // Of codes: the scales of their blocks, an element each, and how they stand for numbers; null where that is not
    // known here.
    const Slice* scales = nullptr;
    uint32_t block_elements = 1;
    const kernels::BlockCodec* codec = nullptr;
  };
  // A tensor, or a box of it, and the slices that together have its elements, each once.
  struct Tensor {
    Box box;
    std::string dtype;  // of what is read; that of slices may be another one, as Find has it
    std::vector<const Slice*> slices;

    bool converts() const;
  };

  // `blocks`: of files without an index.
  explicit SavedTensors(ReadScope scope = {}, BlockedArrays blocks = {})
      : scope_(std::move(scope)), blocks_(std::move(blocks)) {}

  // DATA_LOSS: damaged, or an index that contradicts the files. As others, the errors of `scope`.
  absl::Status AddPart(const Part& part);

  // A file that is no part of a checkpoint; see reader.h.
  absl::Status AddFile(const std::string& path, uint64_t committed_steps);

  // `name` as TensorName has it. Numbers may have been saved in fp32, bf16 or as codes, whatever `dtype` is.
  // FAILED_PRECONDITION: it is missing, or elements of it, or it has another shape, or a dtype of no such numbers.
  absl::StatusOr<Tensor> Find(const std::string& name, const std::string& dtype, const Box& box) const;

  // All slices by tensor name, but scales.
  const std::map<std::string, std::vector<Slice>>& slices() const { return slices_; }

  // Compares the files of these tensors with their checksums. DATA_LOSS: one is damaged.
  static absl::Status Verify(const std::vector<Tensor>& tensors, const ReadScope& scope = {});

  // The elements, row-major, converted where they were saved in another dtype: bf16 is rounded to nearest even. For
  // codes see read_blocks.h.
  static absl::Status Read(const Tensor& tensor, std::byte* to, const ReadScope& scope = {});

 private:
  absl::StatusOr<SavedFile*> Open(const std::string& path, std::vector<Slice>* slices, std::vector<std::string>* names);

  absl::Status Charge(const std::string& path, const SafetensorsHeader& header, uint64_t text_bytes);

  const ReadScope scope_;
  const BlockedArrays blocks_;
  FilePool pool_;
  std::vector<memory::MemoryReservation> reservations_;  // of what `files_` and `slices_` take
  std::vector<std::unique_ptr<SavedFile>> files_;
  uint64_t kept_bytes_ = 0;                           // that are not reserved
  std::set<std::string> of_parts_;                    // paths of those that parts have
  std::map<std::string, std::vector<Slice>> slices_;  // by tensor name
  std::deque<Slice> scales_;                          // what slices point to
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SAVED_TENSORS_H_
