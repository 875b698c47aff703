// SPDX-License-Identifier: Apache-2.0
// The file that Python's torch.export.save() writes: a zip of JSON texts and of raw tensors (PT2
// archive). Nothing in it is ever unpickled.
#pragma once

#include <caffe2/serialize/inline_container.h>

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ddp/core/safetensors.hpp"

namespace ddp::detail {

class Pt2Archive {
 public:
  /// Throws ReadError if `path` is no such archive, or one of another version.
  explicit Pt2Archive(const std::string& path);

  const std::string& path() const { return path_; }
  bool has(const std::string& entry) const { return sizes_.count(entry) != 0; }
  /// Names X of the entries models/X.json.
  std::vector<std::string> programs() const;
  /// The whole entry. Throws DataError if it is missing or longer than `max_bytes`.
  std::string text(const std::string& entry, std::size_t max_bytes);
  /// The tensors of data/weights or data/constants that the table of `program` names. Tensors that
  /// share memory in Python share it here.
  TensorMap weights(const std::string& program);
  TensorMap constants(const std::string& program);
  /// The bytes of an archive that differs in the weights of the programs: they are `tensors`, in
  /// the archive's dtypes, and are frozen where these are. Throws DataError if the archive has a
  /// weight that `tensors` lacks, or one of other sizes.
  std::string with_weights(const std::vector<std::string>& programs, const TensorMap& tensors);

 private:
  TensorMap tensors(const std::string& folder, const std::string& table);
  at::Storage storage(const std::string& entry);
  void overwrite_weights(const std::string& program, const TensorMap& new_tensors);
  void check_bools(const std::string& entry);

  std::string path_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  std::map<std::string, std::size_t> sizes_;     // uncompressed bytes of each entry
  std::map<std::string, at::Storage> storages_;  // of the entries read so far
  std::set<std::string> checked_bools_;          // entries that hold only 0 and 1
};

}  // namespace ddp::detail
