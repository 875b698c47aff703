// SPDX-License-Identifier: Apache-2.0
#include "models/bert.hpp"

#include <torch/torch.h>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"

namespace models {
namespace detail {
namespace {

struct Dense {
  torch::Tensor weight;  // [out, in]
  torch::Tensor bias;

  torch::Tensor forward(const torch::Tensor& x) const {
    return ddp::ops::linear(x, weight, {.bias = bias});
  }
  /// x Wᵀ, for an op that adds the bias.
  torch::Tensor product(const torch::Tensor& x) const { return ddp::ops::linear(x, weight); }
};

std::shared_ptr<Group> new_group(torch::nn::Module& owner, const std::string& name) {
  auto group = std::make_shared<Group>();
  owner.register_module(name, group);
  return group;
}

Dense new_dense(torch::nn::Module& owner, const std::string& name, int64_t in, int64_t out,
                const torch::TensorOptions& memory) {
  const auto group = new_group(owner, name);
  return {new_parameter(*group, "weight", {out, in}, memory),
          new_parameter(*group, "bias", {out}, memory)};
}

struct BertNorm {
  torch::Tensor weight;
  torch::Tensor bias;
};

BertNorm new_bert_norm(torch::nn::Module& owner, int64_t size, const torch::TensorOptions& memory) {
  const auto group = new_group(owner, "LayerNorm");
  return {new_parameter(*group, "weight", {size}, memory),
          new_parameter(*group, "bias", {size}, memory)};
}

/// The end of a residual branch: LayerNorm(residual + dropout(dense(x))).
struct BranchEnd {
  Dense dense;
  BertNorm norm;

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& residual, double eps,
                        double dropout_p) const {
    return ddp::ops::add_layer_norm(dense.product(x), residual, norm.weight, norm.bias, eps,
                                    {.bias = dense.bias, .dropout_p = dropout_p})
        .normed;
  }
};

BranchEnd new_branch_end(torch::nn::Module& owner, int64_t in, int64_t out,
                         const torch::TensorOptions& memory) {
  const auto group = new_group(owner, "output");
  return {new_dense(*group, "dense", in, out, memory), new_bert_norm(*group, out, memory)};
}

}  // namespace

class BertLayer : public torch::nn::Module {
 public:
  BertLayer(const BertOptions& o, const torch::TensorOptions& memory, std::size_t index)
      : num_heads_(o.num_heads),
        hidden_dropout_(o.hidden_dropout),
        attention_dropout_(o.attention_dropout),
        eps_(o.layer_norm_eps),
        index_(index) {
    const auto attention = new_group(*this, "attention");
    const auto self = new_group(*attention, "self");
    query_ = new_dense(*self, "query", o.hidden_size, o.hidden_size, memory);
    key_ = new_dense(*self, "key", o.hidden_size, o.hidden_size, memory);
    value_ = new_dense(*self, "value", o.hidden_size, o.hidden_size, memory);
    join();  // before buckets and optimizers know the memory
    attention_end_ = new_branch_end(*attention, o.hidden_size, o.hidden_size, memory);
    intermediate_ = new_dense(*new_group(*this, "intermediate"), "dense", o.hidden_size,
                              o.intermediate_size, memory);
    mlp_end_ = new_branch_end(*this, o.intermediate_size, o.hidden_size, memory);
  }

  /// Maps [batch, seq, hidden] to the same shape.
  torch::Tensor forward(const torch::Tensor& hidden, const LayerCall& call) {
    const double p = is_training() ? hidden_dropout_ : 0.0;
    const auto bias = ddp::ops::joined_rows({query_.bias, key_.bias, value_.bias});
    const auto [qkv, skipped] = ddp::ops::linear_and_residual(
        hidden, ddp::ops::joined_rows({query_.weight, key_.weight, value_.weight}),
        {.bias = bias.detach()});
    const auto attended = attention_end_.forward(attention(qkv, bias, call), skipped, eps_, p);
    const auto [to_activate, skipped_mlp] =
        ddp::ops::linear_and_residual(attended, intermediate_.weight);
    const auto wide = ddp::ops::gelu(to_activate, {.bias = intermediate_.bias});
    return mlp_end_.forward(wide, skipped_mlp, eps_, p);
  }

  void join() const {
    ddp::ops::join_rows({query_.weight, key_.weight, value_.weight});
    ddp::ops::join_rows({query_.bias, key_.bias, value_.bias});
  }

 private:
  torch::Tensor attention(const torch::Tensor& qkv, const torch::Tensor& bias,
                          const LayerCall& call) const {
    const auto [query, key, value] =
        ddp::ops::split_heads(qkv, num_heads_, num_heads_, {.added_bias = bias});
    return attend(query, key, value, call, index_, is_training() ? attention_dropout_ : 0.0);
  }

  Dense query_, key_, value_, intermediate_;
  BranchEnd attention_end_, mlp_end_;
  int64_t num_heads_;
  double hidden_dropout_, attention_dropout_, eps_;
  std::size_t index_;
};

struct BertHead {
  Dense dense;
  BertNorm norm;
  torch::Tensor bias;  // [vocab]

  /// The decoder's input.
  torch::Tensor transform(const torch::Tensor& hidden, double eps) const {
    const auto activated = ddp::ops::gelu(dense.product(hidden), {.bias = dense.bias});
    return ddp::ops::layer_norm(activated, norm.weight, norm.bias, eps).normed;
  }
};

}  // namespace detail

namespace {

void check(const BertOptions& o) {
  detail::check_sizes("BERT", {{"vocab_size", o.vocab_size},
                               {"max_positions", o.max_positions},
                               {"num_token_types", o.num_token_types},
                               {"hidden_size", o.hidden_size},
                               {"num_layers", o.num_layers},
                               {"num_heads", o.num_heads}});
  if (o.hidden_size % o.num_heads != 0) {
    detail::refuse("BERT: hidden_size = ", o.hidden_size,
                   " is not a multiple of num_heads = ", o.num_heads);
  }
  for (const auto& [name, p] : {std::pair{"hidden_dropout", o.hidden_dropout},
                                {"attention_dropout", o.attention_dropout}}) {
    if (!(p >= 0 && p < 1)) {
      detail::refuse("BERT: ", name, " = ", p, ": it must be at least 0 and below 1");
    }
  }
  if (o.pad_token_id < -1 || o.pad_token_id >= o.vocab_size) {
    detail::refuse("BERT: pad_token_id = ", o.pad_token_id, " is outside the vocabulary of ",
                   o.vocab_size);
  }
}

void check_shape(const TokenInput& input) {
  if (input.key_mask.defined()) {
    detail::refuse("BERT has no cache, so it takes no key_mask; fix: pack rows with padding");
  }
  if (input.token_type_ids.defined() && input.token_type_ids.sizes() != input.input_ids.sizes()) {
    detail::refuse("token_type_ids must have the shape of input_ids ", input.input_ids.sizes(),
                   ", not ", input.token_type_ids.sizes());
  }
}

}  // namespace

BertImpl::BertImpl(const BertOptions& options, const torch::TensorOptions& tensor_options)
    : options_(options) {
  check(options_);
  const int64_t width = options_.hidden_size;
  if (options_.intermediate_size == 0) {
    options_.intermediate_size = 4 * width;
  }
  const auto body = detail::new_group(*this, "bert");
  const auto embeddings = detail::new_group(*body, "embeddings");
  const auto table = [&](const char* name, int64_t rows) {
    return detail::new_parameter(*detail::new_group(*embeddings, name), "weight", {rows, width},
                                 tensor_options);
  };
  word_embeddings_ = table("word_embeddings", options_.vocab_size);
  position_embeddings_ = table("position_embeddings", options_.max_positions);
  token_type_embeddings_ = table("token_type_embeddings", options_.num_token_types);
  const auto norm = detail::new_bert_norm(*embeddings, width, tensor_options);
  norm_weight_ = norm.weight;
  norm_bias_ = norm.bias;
  const auto layers = detail::new_group(*detail::new_group(*body, "encoder"), "layer");
  for (int64_t i = 0; i < options_.num_layers; ++i) {
    layers_.push_back(layers->register_module(
        std::to_string(i), std::make_shared<detail::BertLayer>(options_, tensor_options,
                                                               static_cast<std::size_t>(i))));
  }
  const auto predictions = detail::new_group(*detail::new_group(*this, "cls"), "predictions");
  const auto transform = detail::new_group(*predictions, "transform");
  head_ = std::make_unique<detail::BertHead>(detail::BertHead{
      .dense = detail::new_dense(*transform, "dense", width, width, tensor_options),
      .norm = detail::new_bert_norm(*transform, width, tensor_options),
      .bias = detail::new_parameter(*predictions, "bias", {options_.vocab_size}, tensor_options)});
  ddp::ops::pad_rows(word_embeddings_);
}

BertImpl::~BertImpl() = default;

void BertImpl::arrange_weights() {
  LanguageModel::arrange_weights();
  for (const auto& layer : layers_) {
    layer->join();
  }
}

void BertImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    auto& value = item.value();
    if (value.dim() == 2) {
      value.normal_(0, options_.initializer_range);
    } else {
      value.fill_(item.key().ends_with("LayerNorm.weight") ? 1 : 0);
    }
  }
  if (options_.pad_token_id >= 0) {
    word_embeddings_.select(0, options_.pad_token_id).zero_();
  }
}

torch::Tensor BertImpl::embed(const TokenInput& input) const {
  auto sum = torch::embedding(word_embeddings_, input.input_ids, options_.pad_token_id) +
             torch::embedding(position_embeddings_, detail::positions_of(input, nullptr));
  if (input.token_type_ids.defined()) {
    sum = sum + torch::embedding(token_type_embeddings_, input.token_type_ids);
  } else {
    sum = sum + token_type_embeddings_.select(0, 0);
  }
  const auto normed =
      ddp::ops::layer_norm(sum, norm_weight_, norm_bias_, options_.layer_norm_eps).normed;
  return options_.hidden_dropout > 0 && is_training()
             ? ddp::ops::dropout(normed, options_.hidden_dropout)
             : normed;
}

torch::Tensor BertImpl::hidden_states(const TokenInput& input) {
  detail::check_input(input, nullptr, options_.max_positions);
  check_shape(input);
  auto call = detail::layer_call(input, nullptr, computation_);
  call.attention.is_causal = false;
  return detail::run_layers(layers_, embed(input), call, computation_);
}

torch::Tensor BertImpl::logits(const torch::Tensor& hidden) const {
  const auto to_decode = head_->transform(hidden, options_.layer_norm_eps);
  return torch::linear(to_decode, word_embeddings_, head_->bias);
}

LmOutput BertImpl::forward(const TokenInput& input, const torch::Tensor& labels) {
  auto hidden = hidden_states(input).flatten(0, 1);
  if (input.target_positions.defined()) {
    hidden = hidden.index_select(0, input.target_positions);
  }
  const auto result = ddp::ops::linear_cross_entropy(
      head_->transform(hidden, options_.layer_norm_eps), word_embeddings_, labels.reshape({-1}),
      loss_options(head_->bias));
  return {result.loss_sum, result.num_correct};
}

bool BertImpl::is_matrix_product(const std::string& name) const {
  return name.find("position_embeddings") == std::string::npos &&
         name.find("token_type_embeddings") == std::string::npos;
}

double BertImpl::flops_per_token(int64_t seq_len) const {
  const auto& transform = head_->dense.weight;
  const double head =
      (word_embeddings_.requires_grad() ? 6.0 : 4.0) *
          static_cast<double>(word_embeddings_.numel()) +
      (transform.requires_grad() ? 6.0 : 4.0) * static_cast<double>(transform.numel());
  return matrix_flops_per_token() - (1 - computation_.head_share) * head +
         2 * detail::attention_flops_per_token(seq_len, options_.hidden_size, options_.num_layers);
}

}  // namespace models
