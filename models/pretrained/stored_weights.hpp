// SPDX-License-Identifier: Apache-2.0
// Which tensors a checkpoint of Hugging Face holds, and where: headers only, no data is read.
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
  std::string dtype;  ///< safetensors' word
  std::vector<int64_t> shape;
  std::size_t file = 0;  ///< index into StoredWeights::files
  uint64_t offset = 0;   ///< of its first byte, from the start of the file
  uint64_t num_bytes = 0;
};

struct StoredWeights {
  std::string source;  ///< what messages call it
  std::vector<std::string> files{};
  std::vector<StoredTensor> tensors{};
};

/// Finds and checks the files of `path` (see load_pretrained). Throws ddp::ReadError.
StoredWeights open_stored_weights(const std::string& path);

/// The stored tensor of each of the module's names.
using MatchedWeights = std::map<std::string, const StoredTensor*>;

struct WeightMatch {
  MatchedWeights weights{};
  ddp::WeightDifferences differences{};
};

/// Finds the module's names in `stored` (see load_pretrained); `module` is ddp::named_weights of
/// it. Throws ddp::ReadError for weights of another dtype than float32, bfloat16 and float16, and
/// ddp::MismatchError for a head that differs from the embedding it should be.
WeightMatch match_weights(const StoredWeights& stored, const ddp::TensorMap& module);

at::ScalarType weight_dtype(const StoredTensor& tensor);

}  // namespace models::detail
