// SPDX-License-Identifier: Apache-2.0
// The pre-norm block of encoders: attention without a mask, exact GELU. Not installed.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string>

#include "ddp/ops/language.hpp"

namespace models::detail {

/// Weight [out, in] and bias of a linear layer, or of a LayerNorm ([dim] each).
struct LinearPair {
  torch::Tensor weight;
  torch::Tensor bias;

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& residual = {}) const {
    return ddp::ops::linear(x, weight, {.bias = bias, .residual = residual});
  }
  /// x weightᵀ, for an op that adds the bias.
  torch::Tensor product(const torch::Tensor& x) const { return ddp::ops::linear(x, weight); }
};

/// `weight` and `bias` in a child `name` of `owner`.
LinearPair new_pair(torch::nn::Module& owner, const char* name, torch::IntArrayRef weight,
                    const torch::TensorOptions& memory);

struct EncoderBlockOptions {
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_heads;
  double norm_eps;
  double dropout = 0;
  double attention_dropout = 0;
  double drop_path = 0;           ///< probability that a sample skips a branch
  bool first_token_only = false;  ///< the result is the first token's: nobody reads the others
};

/// torchvision's names: ln_1, self_attention.in_proj_weight, self_attention.out_proj, ln_2, mlp.0,
/// mlp.3.
class EncoderBlock : public torch::nn::Module {
 public:
  EncoderBlock(const EncoderBlockOptions& options, const torch::TensorOptions& memory);

  /// Maps [batch, seq, hidden] to the same shape, or to [batch, 1, hidden].
  torch::Tensor forward(const torch::Tensor& hidden, ddp::ops::AttentionBackend backend =
                                                         ddp::ops::AttentionBackend::Auto) const;

 private:
  /// The end of a residual branch: `value`, and what the op that adds the residual still applies.
  struct Branch {
    torch::Tensor value;
    ddp::ops::BranchOptions rest{};
  };

  double dropout() const { return is_training() ? options_.dropout : 0.0; }
  double drop_path() const { return is_training() ? options_.drop_path : 0.0; }
  torch::Tensor attention(const torch::Tensor& x, ddp::ops::AttentionBackend backend) const;
  Branch end(const torch::Tensor& product, const torch::Tensor& bias) const;

  EncoderBlockOptions options_;
  LinearPair ln_1_, ln_2_, in_proj_, out_proj_, widen_, narrow_;
};

/// Initialises a block's parameter as torchvision and torch.nn.MultiheadAttention do. Returns false
/// if `name` is none of a block. Call it without gradient recording.
bool reset_block_parameter(const std::string& name, torch::Tensor& value);

}  // namespace models::detail
