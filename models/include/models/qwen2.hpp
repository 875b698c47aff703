// SPDX-License-Identifier: Apache-2.0
// The decoder of Qwen2 (arXiv:2407.10671) and, without the biases, of the Llama family, as Hugging
// Face's transformers defines them (Qwen2ForCausalLM, LlamaForCausalLM): RMSNorm, rotary positions,
// grouped-query attention, SwiGLU. Parameter names are Hugging Face's.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/ops/language.hpp"
#include "models/causal_lm.hpp"
#include "models/lora.hpp"

namespace models {

/// Sizes; the defaults are Qwen2-7B's.
struct Qwen2Options {
  int64_t vocab_size = 152064;             ///< rows of the embedding
  int64_t hidden_size = 3584;              ///< width
  int64_t intermediate_size = 18944;       ///< width of the MLP
  int64_t num_layers = 28;                 ///< blocks
  int64_t num_heads = 28;                  ///< of the queries
  int64_t num_kv_heads = 4;                ///< of keys and values; a divisor of num_heads
  int64_t head_dim = 128;                  ///< even
  int64_t max_positions = 32768;           ///< longest sequence
  double rms_norm_eps = 1e-6;              ///< added to the mean square
  double rope_theta = 1e6;                 ///< base of the wavelengths
  bool qkv_bias = true;                    ///< Llama: false
  bool o_bias = false;                     ///< Llama with attention_bias: true
  bool mlp_bias = false;                   ///< Llama with mlp_bias: true
  bool tie_word_embeddings = false;        ///< the head is the embedding
  double initializer_range = 0.02;         ///< standard deviation of initial weights
  ddp::ops::RotaryOptions rope_scaling{};  ///< head_dim and theta are taken from the fields above
};
Qwen2Options qwen2_0_5b();  ///< sizes of Qwen2-0.5B
Qwen2Options qwen2_1_5b();  ///< sizes of Qwen2-1.5B
Qwen2Options qwen2_7b();    ///< sizes of Qwen2-7B

namespace detail {
class Qwen2Layer;
}

class Qwen2Impl : public CausalLm {
 public:
  /// Creates uninitialised parameters with `tensor_options` (device, dtype). Throws
  /// std::invalid_argument if the sizes do not fit together.
  explicit Qwen2Impl(const Qwen2Options& options, const torch::TensorOptions& tensor_options = {});
  ~Qwen2Impl() override;

  /// Hugging Face's initialisation: normal(0, initializer_range), biases 0, norms 1; drawn from the
  /// default generator of the parameters' device.
  void reset_parameters();

  torch::Tensor hidden_states(const TokenInput& input, KeyValueCache* cache = nullptr) override;
  const torch::Tensor& head_weight() const override;
  void arrange_weights() override;
  int64_t num_layers() const override { return options_.num_layers; }          ///< of options()
  int64_t max_positions() const override { return options_.max_positions; }    ///< of options()
  KeyValueCache make_cache(int64_t batch, int64_t max_length) const override;  ///< empty
  double flops_per_token(int64_t seq_len) const override;
  const Qwen2Options& options() const { return options_; }  ///< as given to the constructor

 private:
  bool is_matrix_product(const std::string& name) const override;
  /// What the rotary tables must cover.
  int64_t num_positions(const TokenInput& input, const KeyValueCache* cache) const;
  const ddp::ops::RotaryTables& rotary_tables(int64_t num_positions);

  Qwen2Options options_;
  std::vector<std::shared_ptr<detail::Qwen2Layer>> layers_;
  torch::Tensor embed_tokens_;                  // model.embed_tokens.weight [vocab, hidden]
  torch::Tensor norm_;                          // model.norm.weight [hidden]
  torch::Tensor lm_head_;                       // lm_head.weight; undefined if tied
  std::vector<ddp::ops::RotaryTables> rotary_;  // of growing sequence lengths
};
TORCH_MODULE(Qwen2);

}  // namespace models
