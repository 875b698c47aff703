// SPDX-License-Identifier: Apache-2.0
#include "models/gpt2.hpp"

#include <torch/torch.h>

#include <cmath>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"

namespace models {
namespace detail {
namespace {

/// Hugging Face's Conv1D: y = x W + b with W [in, out].
struct Conv1d {
  torch::Tensor weight;
  torch::Tensor bias;

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& residual = {}) const {
    return ddp::ops::linear(x, weight, {.bias = bias, .residual = residual, .transposed = true});
  }
  /// x W, for an op that adds the bias.
  torch::Tensor product(const torch::Tensor& x) const {
    return ddp::ops::linear(x, weight, {.transposed = true});
  }
};

Conv1d new_conv1d(torch::nn::Module& owner, const char* name, int64_t in, int64_t out,
                  const torch::TensorOptions& memory) {
  auto group = std::make_shared<Group>();
  owner.register_module(name, group);
  return {new_parameter(*group, "weight", {in, out}, memory),
          new_parameter(*group, "bias", {out}, memory)};
}

struct LayerNorm {
  torch::Tensor weight;
  torch::Tensor bias;
  double eps = 1e-5;

  ddp::ops::NormedResidual forward(const torch::Tensor& x) const {
    return ddp::ops::layer_norm(x, weight, bias, eps);
  }
  /// Of residual + dropout(branch).
  ddp::ops::NormedResidual forward(const torch::Tensor& branch, const torch::Tensor& residual,
                                   const ddp::ops::BranchOptions& options) const {
    return ddp::ops::add_layer_norm(branch, residual, weight, bias, eps, options);
  }
};

LayerNorm new_layer_norm(torch::nn::Module& owner, const char* name, const Gpt2Options& o,
                         const torch::TensorOptions& memory) {
  auto group = std::make_shared<Group>();
  owner.register_module(name, group);
  return {new_parameter(*group, "weight", {o.hidden_size}, memory),
          new_parameter(*group, "bias", {o.hidden_size}, memory), o.layer_norm_eps};
}

}  // namespace

class Gpt2Block : public torch::nn::Module {
 public:
  Gpt2Block(const Gpt2Options& o, const torch::TensorOptions& memory, std::size_t index)
      : num_heads_(o.num_heads), dropout_(o.dropout), index_(index) {
    const int64_t wide = o.intermediate_size;
    ln_1_ = new_layer_norm(*this, "ln_1", o, memory);
    auto attention = register_module("attn", std::make_shared<Group>());
    c_attn_ = new_conv1d(*attention, "c_attn", o.hidden_size, 3 * o.hidden_size, memory);
    attn_c_proj_ = new_conv1d(*attention, "c_proj", o.hidden_size, o.hidden_size, memory);
    ln_2_ = new_layer_norm(*this, "ln_2", o, memory);
    auto mlp = register_module("mlp", std::make_shared<Group>());
    c_fc_ = new_conv1d(*mlp, "c_fc", o.hidden_size, wide, memory);
    mlp_c_proj_ = new_conv1d(*mlp, "c_proj", wide, o.hidden_size, memory);
  }

  /// Maps [batch, seq, hidden] to the same shape.
  torch::Tensor forward(const torch::Tensor& hidden, const LayerCall& call) {
    const double p = is_training() ? dropout_ : 0.0;
    const auto [to_attend, skipped] = ln_1_.forward(hidden);
    const auto attended = attn_c_proj_.product(attention(to_attend, call, p));
    const auto [to_widen, skipped_mlp] =
        ln_2_.forward(attended, skipped, {.bias = attn_c_proj_.bias, .dropout_p = p});
    const auto wide = ddp::ops::gelu(c_fc_.product(to_widen), {.bias = c_fc_.bias, .tanh = true});
    return p > 0 ? ddp::ops::add_branch(mlp_c_proj_.product(wide), skipped_mlp,
                                        {.bias = mlp_c_proj_.bias, .dropout_p = p})
                 : mlp_c_proj_.forward(wide, skipped_mlp);
  }

 private:
  torch::Tensor attention(const torch::Tensor& x, const LayerCall& call, double dropout_p) {
    const auto [query, key, value] = ddp::ops::split_heads(
        ddp::ops::linear(x, c_attn_.weight, {.bias = c_attn_.bias.detach(), .transposed = true}),
        num_heads_, num_heads_, {.added_bias = c_attn_.bias});
    return attend(query, key, value, call, index_, dropout_p);
  }

  LayerNorm ln_1_, ln_2_;
  Conv1d c_attn_, attn_c_proj_, c_fc_, mlp_c_proj_;
  int64_t num_heads_;
  double dropout_;
  std::size_t index_;
};

}  // namespace detail

namespace {

void check(const Gpt2Options& o) {
  detail::check_sizes("GPT-2", {{"vocab_size", o.vocab_size},
                                {"max_positions", o.max_positions},
                                {"hidden_size", o.hidden_size},
                                {"num_layers", o.num_layers},
                                {"num_heads", o.num_heads}});
  if (o.hidden_size % o.num_heads != 0) {
    detail::refuse("GPT-2: hidden_size = ", o.hidden_size,
                   " is not a multiple of num_heads = ", o.num_heads);
  }
  if (!(o.dropout >= 0 && o.dropout < 1)) {
    detail::refuse("GPT-2: dropout = ", o.dropout, ": it must be at least 0 and below 1");
  }
}

}  // namespace

Gpt2Impl::Gpt2Impl(const Gpt2Options& options, const torch::TensorOptions& tensor_options)
    : options_(options) {
  check(options_);
  if (options_.intermediate_size == 0) {
    options_.intermediate_size = 4 * options_.hidden_size;
  }
  auto body = register_module("transformer", std::make_shared<detail::Group>());
  const auto table = [&](const char* name, int64_t rows) {
    auto group = body->register_module(name, std::make_shared<detail::Group>());
    return detail::new_parameter(*group, "weight", {rows, options_.hidden_size}, tensor_options);
  };
  wte_ = table("wte", options_.vocab_size);
  wpe_ = table("wpe", options_.max_positions);
  auto blocks = body->register_module("h", std::make_shared<detail::Group>());
  for (int64_t i = 0; i < options_.num_layers; ++i) {
    blocks_.push_back(blocks->register_module(
        std::to_string(i), std::make_shared<detail::Gpt2Block>(options_, tensor_options,
                                                               static_cast<std::size_t>(i))));
  }
  const auto norm = detail::new_layer_norm(*body, "ln_f", options_, tensor_options);
  ln_f_weight_ = norm.weight;
  ln_f_bias_ = norm.bias;
  ddp::ops::pad_rows(wte_);
}

Gpt2Impl::~Gpt2Impl() = default;

void Gpt2Impl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  const double residual_std =
      options_.initializer_range / std::sqrt(2.0 * static_cast<double>(options_.num_layers));
  for (auto& item : named_parameters()) {
    auto& value = item.value();
    const auto& name = item.key();
    if (value.dim() == 2) {
      const bool residual = name.find("c_proj.weight") != std::string::npos;
      value.normal_(0, residual ? residual_std : options_.initializer_range);
    } else {
      value.fill_(name.find(".bias") == std::string::npos ? 1 : 0);
    }
  }
}

torch::Tensor Gpt2Impl::hidden_states(const TokenInput& input, KeyValueCache* cache) {
  detail::check_input(input, cache, options_.max_positions);
  auto hidden = torch::embedding(wte_, input.input_ids) +
                torch::embedding(wpe_, detail::positions_of(input, cache));
  if (options_.dropout > 0 && is_training()) {
    hidden = ddp::ops::dropout(hidden, options_.dropout);
  }
  hidden = detail::run_layers(blocks_, hidden, detail::layer_call(input, cache, computation_),
                              computation_);
  return ddp::ops::layer_norm(hidden, ln_f_weight_, ln_f_bias_, options_.layer_norm_eps).normed;
}

KeyValueCache Gpt2Impl::make_cache(int64_t batch, int64_t max_length) const {
  const int64_t head_dim = options_.hidden_size / options_.num_heads;
  return detail::new_cache(options_.num_layers, {batch, options_.num_heads, max_length, head_dim},
                           wte_.options());
}

bool Gpt2Impl::is_matrix_product(const std::string& name) const {
  return name != "transformer.wpe.weight";
}

double Gpt2Impl::flops_per_token(int64_t seq_len) const {
  return matrix_flops_per_token() +
         detail::attention_flops_per_token(seq_len, options_.hidden_size, options_.num_layers);
}

}  // namespace models
