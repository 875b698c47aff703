// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "models/pretrained/peft_adapter.hpp"
#include "pretrained/new_folder.hpp"
#include "pretrained/save_model.hpp"
#include "pretrained/stored_weights.hpp"

namespace models {
namespace {

// The dtype that most bytes in the files have.
at::ScalarType stored_dtype(const std::string& path) {
  const auto stored = detail::open_stored_weights(path);
  std::map<std::string, uint64_t> bytes;
  const detail::StoredTensor* most = nullptr;
  for (const auto& tensor : stored.tensors) {
    bytes[tensor.dtype] += tensor.num_bytes;
    most = most == nullptr || bytes[tensor.dtype] > bytes[most->dtype] ? &tensor : most;
  }
  return most == nullptr ? at::kFloat : detail::weight_dtype(*most);
}

}  // namespace

void merge_adapter(const std::string& base, const std::string& adapter, const std::string& output,
                   const PretrainedSaveOptions& options) {
  const auto config = read_hf_config(base);
  auto saved = options;
  saved.dtype = options.dtype.value_or(stored_dtype(base));
  saved.files = read_model_files(base);
  // Created first, so that a taken name is reported before the work.
  detail::NewFolder target(output, options.replace);
  auto model = make_causal_lm(config, at::TensorOptions().dtype(*saved.dtype));
  load_pretrained(*model, base);
  require_base(adapter, base_identity(*model));
  add_adapter(*model, adapter);
  merge_lora(*model);
  detail::save_model(*model, config, target, saved);
}

}  // namespace models
