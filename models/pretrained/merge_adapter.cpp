// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "models/pretrained/peft_adapter.hpp"
#include "pretrained/new_folder.hpp"
#include "pretrained/save_model.hpp"
#include "pretrained/stored_weights.hpp"

namespace models {
namespace {

struct StoredDtypes {
  at::ScalarType most = at::kFloat;   // that most bytes in the files have
  at::ScalarType exact = at::kFloat;  // that holds the values of all files
};

StoredDtypes stored_dtypes(const std::string& path) {
  std::map<at::ScalarType, uint64_t> bytes;
  for (const auto& tensor : detail::open_stored_weights(path).tensors) {
    if (tensor.dtype == "F32" || tensor.dtype == "BF16" || tensor.dtype == "F16") {
      bytes[detail::weight_dtype(tensor)] += tensor.num_bytes;
    }
  }
  StoredDtypes dtypes;
  uint64_t most = 0;
  for (const auto& [dtype, sum] : bytes) {
    if (sum > most) {
      most = sum;
      dtypes.most = dtype;
    }
  }
  dtypes.exact = bytes.size() == 1 ? dtypes.most : at::kFloat;
  return dtypes;
}

// Training may have cast the base's weights. Its identity is that of the weights in its dtype.
void require_base(const std::string& adapter, const torch::nn::Module& base, at::ScalarType dtype) {
  const auto trained = read_adapter(adapter).base_identity;
  for (const auto known : {at::kFloat, at::kBFloat16, at::kHalf}) {
    if (trained.starts_with(base_identity(known, "")) && trained == base_identity(base, known)) {
      return;
    }
  }
  models::require_base(adapter, base_identity(base, dtype));
}

}  // namespace

void merge_adapter(const std::string& base, const std::string& adapter, const std::string& output,
                   const PretrainedSaveOptions& options) {
  const auto config = read_hf_config(base);
  const auto stored = stored_dtypes(base);
  auto saved = options;
  saved.dtype = options.dtype.value_or(stored.most);
  saved.files = read_model_files(base);
  // Created first, so that a taken name is reported before the work.
  detail::NewFolder target(output, options.replace);
  auto model = make_causal_lm(config, at::TensorOptions().dtype(stored.exact));
  load_pretrained(*model, base);
  require_base(adapter, *model, stored.most);
  if (*saved.dtype != stored.exact) {
    model->to(at::kFloat);  // so that only the saved weights are rounded
  }
  add_adapter(*model, adapter);
  merge_lora(*model);
  detail::save_model(*model, config, target, saved);
}

}  // namespace models
