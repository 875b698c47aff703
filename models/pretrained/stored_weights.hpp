// SPDX-License-Identifier: Apache-2.0
// Lists the tensors of a Hugging Face checkpoint and their places. Reads headers only, no data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ddp/train/weights.hpp"

namespace models::detail {

struct StoredTensor {
  std::string name;
  std::string dtype;  ///< dtype name of safetensors
  std::vector<int64_t> shape;
  std::size_t file = 0;  ///< index into StoredWeights::files
  uint64_t offset = 0;   ///< first byte, counted from the start of the file
  uint64_t num_bytes = 0;
};

struct StoredWeights {
  std::string source;  ///< name in messages
  std::vector<std::string> files{};
  std::vector<StoredTensor> tensors{};
};

/// Finds and checks the files of `path` (see load_pretrained). Throws ddp::ReadError.
StoredWeights open_stored_weights(const std::string& path);

/// Stored tensor by the module's name.
using MatchedWeights = std::map<std::string, const StoredTensor*>;

struct WeightMatch {
  MatchedWeights weights{};
  ddp::WeightDifferences differences{};
};

/// Finds the module's names in `stored` (see load_pretrained); `module` is its ddp::named_weights.
/// Throws ddp::ReadError for weights of another dtype than float32, bfloat16 and float16. Throws
/// ddp::MismatchError if the head of a tied model differs from the embedding.
WeightMatch match_weights(const StoredWeights& stored, const ddp::TensorMap& module);

at::ScalarType weight_dtype(const StoredTensor& tensor);

}  // namespace models::detail
