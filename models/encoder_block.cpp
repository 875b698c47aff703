// SPDX-License-Identifier: Apache-2.0
#include "encoder_block.hpp"

#include <torch/torch.h>

#include <cmath>

#include "decoder_parts.hpp"

namespace models::detail {

LinearPair new_pair(torch::nn::Module& owner, const char* name, torch::IntArrayRef weight,
                    const torch::TensorOptions& memory) {
  auto group = std::make_shared<Group>();
  owner.register_module(name, group);
  return {new_parameter(*group, "weight", weight, memory),
          new_parameter(*group, "bias", {weight[0]}, memory)};
}

EncoderBlock::EncoderBlock(const EncoderBlockOptions& o, const torch::TensorOptions& memory)
    : options_(o) {
  const int64_t dim = o.hidden_size;
  ln_1_ = new_pair(*this, "ln_1", {dim}, memory);
  auto attention = register_module("self_attention", std::make_shared<Group>());
  in_proj_ = {new_parameter(*attention, "in_proj_weight", {3 * dim, dim}, memory),
              new_parameter(*attention, "in_proj_bias", {3 * dim}, memory)};
  out_proj_ = new_pair(*attention, "out_proj", {dim, dim}, memory);
  ln_2_ = new_pair(*this, "ln_2", {dim}, memory);
  auto mlp = register_module("mlp", std::make_shared<Group>());
  widen_ = new_pair(*mlp, "0", {o.intermediate_size, dim}, memory);
  narrow_ = new_pair(*mlp, "3", {dim, o.intermediate_size}, memory);
}

torch::Tensor EncoderBlock::forward(const torch::Tensor& hidden,
                                    ddp::ops::AttentionBackend backend) const {
  const double eps = options_.norm_eps;
  auto [to_attend, skipped] = ddp::ops::layer_norm(hidden, ln_1_.weight, ln_1_.bias, eps);
  if (options_.first_token_only) {
    skipped = skipped.narrow(1, 0, 1).contiguous();
  }
  const auto attended = end(out_proj_.product(attention(to_attend, backend)), out_proj_.bias);
  const auto [to_widen, skipped_mlp] = ddp::ops::add_layer_norm(
      attended.value, skipped, ln_2_.weight, ln_2_.bias, eps, attended.rest);
  auto wide = ddp::ops::gelu(widen_.product(to_widen), {.bias = widen_.bias});
  if (dropout() == 0 && drop_path() == 0) {
    return narrow_.forward(wide, skipped_mlp);
  }
  if (dropout() > 0) {
    wide = ddp::ops::dropout(wide, dropout());
  }
  const auto narrow = end(narrow_.product(wide), narrow_.bias);
  return ddp::ops::add_branch(narrow.value, skipped_mlp, narrow.rest);
}

torch::Tensor EncoderBlock::attention(const torch::Tensor& x,
                                      ddp::ops::AttentionBackend backend) const {
  auto [query, key, value] =
      ddp::ops::split_heads(ddp::ops::linear(x, in_proj_.weight, {.bias = in_proj_.bias.detach()}),
                            options_.num_heads, options_.num_heads, {.added_bias = in_proj_.bias});
  ddp::ops::AttentionOptions attention{
      .backend = backend,
      .is_causal = false,
      .dropout_p = is_training() ? options_.attention_dropout : 0.0};
  if (options_.first_token_only) {
    // cuDNN's kernel is made for many queries.
    query = query.narrow(1, 0, 1);
    attention.shapes_recur = false;
  }
  return ddp::ops::attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                             attention)
      .transpose(1, 2)
      .reshape({x.size(0), query.size(1), options_.hidden_size});
}

// Stochastic depth scales the whole branch, so bias and dropout must come before it. Without it the
// op that adds the residual applies both in its own pass.
EncoderBlock::Branch EncoderBlock::end(const torch::Tensor& product,
                                       const torch::Tensor& bias) const {
  if (drop_path() == 0) {
    return {product, {.bias = bias, .dropout_p = dropout()}};
  }
  auto branch = product + bias;
  if (dropout() > 0) {
    branch = ddp::ops::dropout(branch, dropout());
  }
  const double keep = 1 - drop_path();
  const auto scale =
      torch::empty({branch.size(0), 1, 1}, branch.options()).bernoulli_(keep).div_(keep);
  return {branch * scale};
}

// The distributions of torchvision/models/vision_transformer.py, and for attention those of
// torch.nn.MultiheadAttention and torch.nn.Linear.
bool reset_block_parameter(const std::string& name, torch::Tensor& value) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("in_proj_weight") || (has(".mlp.") && value.dim() == 2)) {
    torch::nn::init::xavier_uniform_(value);
  } else if (has(".mlp.")) {
    value.normal_(0, 1e-6);
  } else if (has("out_proj.weight")) {
    const double bound = 1 / std::sqrt(static_cast<double>(value.size(1)));
    value.uniform_(-bound, bound);
  } else if (has("in_proj_bias") || has("out_proj.bias") || has(".ln_1.") || has(".ln_2.")) {
    value.fill_(has(".weight") ? 1 : 0);
  } else {
    return false;
  }
  return true;
}

}  // namespace models::detail
