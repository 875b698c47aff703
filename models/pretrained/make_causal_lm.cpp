// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/error.hpp"
#include "models/pretrained/hf_config.hpp"

namespace models {

std::shared_ptr<CausalLm> make_causal_lm(const HfConfig& config,
                                         const torch::TensorOptions& tensor_options) {
  try {
    if (const auto* qwen2 = std::get_if<Qwen2Options>(&config.options)) {
      return std::make_shared<Qwen2Impl>(*qwen2, tensor_options);
    }
    return std::make_shared<Gpt2Impl>(std::get<Gpt2Options>(config.options), tensor_options);
  } catch (const std::invalid_argument& error) {  // sizes that no reader of config.json checked
    throw ddp::SettingsError(error.what());
  }
}

}  // namespace models
