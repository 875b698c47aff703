// SPDX-License-Identifier: Apache-2.0
#include "models/encoder.hpp"

#include <torch/torch.h>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"
#include "encoder_block.hpp"

namespace models {
namespace {

constexpr double kInitialStd = 0.02;

EncoderOptions completed(EncoderOptions o) {
  if (o.intermediate_size == 0) {
    o.intermediate_size = 4 * o.hidden_size;
  }
  detail::check_sizes("the encoder", {{"vocab_size", o.vocab_size},
                                      {"max_positions", o.max_positions},
                                      {"hidden_size", o.hidden_size},
                                      {"num_layers", o.num_layers},
                                      {"num_heads", o.num_heads},
                                      {"intermediate_size", o.intermediate_size}});
  if (o.hidden_size % o.num_heads != 0) {
    detail::refuse("the encoder: hidden_size = ", o.hidden_size,
                   " is not a multiple of num_heads = ", o.num_heads);
  }
  return o;
}

}  // namespace

EncoderImpl::EncoderImpl(const EncoderOptions& options, const torch::TensorOptions& tensor_options)
    : options_(completed(options)) {
  const auto& o = options_;
  const auto matrix = [&](const char* name, int64_t rows) {
    auto group = register_module(name, std::make_shared<detail::Group>());
    return detail::new_parameter(*group, "weight", {rows, o.hidden_size}, tensor_options);
  };
  words_ = matrix("words", o.vocab_size);
  positions_ = matrix("positions", o.max_positions);
  auto layers = register_module("layers", std::make_shared<detail::Group>());
  const detail::EncoderBlockOptions block{.hidden_size = o.hidden_size,
                                          .intermediate_size = o.intermediate_size,
                                          .num_heads = o.num_heads,
                                          .norm_eps = o.layer_norm_eps};
  for (int64_t i = 0; i < o.num_layers; ++i) {
    blocks_.push_back(layers->register_module(
        std::to_string(i), std::make_shared<detail::EncoderBlock>(block, tensor_options)));
  }
  const auto norm = detail::new_pair(*this, "norm", {o.hidden_size}, tensor_options);
  norm_weight_ = norm.weight;
  norm_bias_ = norm.bias;
  head_ = matrix("head", o.vocab_size);
  ddp::ops::pad_rows(head_);
  reset_parameters();
}

EncoderImpl::~EncoderImpl() = default;

void EncoderImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    auto& value = item.value();
    if (detail::reset_block_parameter("." + item.key(), value)) {
      continue;
    }
    if (value.dim() == 2) {
      value.normal_(0, kInitialStd);
    } else {
      value.fill_(item.key() == "norm.weight" ? 1 : 0);
    }
  }
}

LmOutput EncoderImpl::forward(const TokenInput& input, const torch::Tensor& labels) {
  detail::check_input(input, nullptr, options_.max_positions);
  if (input.document_offsets.defined() || input.key_mask.defined() ||
      input.token_type_ids.defined() || input.target_positions.defined()) {
    detail::refuse(
        "the encoder takes input_ids and position_ids only; fix: clear the other fields");
  }
  const auto places = input.position_ids.defined()
                          ? torch::embedding(positions_, input.position_ids)
                          : positions_.narrow(0, 0, input.input_ids.size(1));
  auto hidden = torch::embedding(words_, input.input_ids) + places;
  for (const auto& block : blocks_) {
    hidden = block->forward(hidden, computation_.attention);
  }
  const auto normed =
      ddp::ops::layer_norm(hidden, norm_weight_, norm_bias_, options_.layer_norm_eps).normed;
  const auto result = ddp::ops::linear_cross_entropy(normed.flatten(0, 1), head_,
                                                     labels.reshape({-1}), loss_options());
  return {result.loss_sum, result.num_correct};
}

bool EncoderImpl::is_matrix_product(const std::string& name) const {
  return name != "words.weight" && name != "positions.weight";
}

double EncoderImpl::flops_per_token(int64_t seq_len) const {
  return matrix_flops_per_token() +
         2 * detail::attention_flops_per_token(seq_len, options_.hidden_size, options_.num_layers);
}

}  // namespace models
