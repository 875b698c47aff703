// SPDX-License-Identifier: Apache-2.0
#include "models/qwen2.hpp"

#include <torch/torch.h>

#include <algorithm>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"

namespace models {
namespace detail {

struct Qwen2Call : LayerCall {
  ddp::ops::RotaryAngles angles;
};

class Qwen2Layer : public torch::nn::Module {
 public:
  Qwen2Layer(const Qwen2Options& o, const torch::TensorOptions& memory, std::size_t index)
      : num_heads_(o.num_heads),
        num_kv_heads_(o.num_kv_heads),
        eps_(o.rms_norm_eps),
        index_(index) {
    auto attention = register_module("self_attn", std::make_shared<Group>());
    const int64_t q_width = o.num_heads * o.head_dim, kv_width = o.num_kv_heads * o.head_dim;
    const auto projection = [&](const char* name, int64_t width) {
      return attention->register_module(name, Linear(o.hidden_size, width, o.qkv_bias, memory));
    };
    const auto q_proj = projection("q_proj", q_width), k_proj = projection("k_proj", kv_width);
    qkv_proj_ = JoinedLinears({q_proj, k_proj, projection("v_proj", kv_width)});
    o_proj_ =
        attention->register_module("o_proj", Linear(q_width, o.hidden_size, o.o_bias, memory));
    auto mlp = register_module("mlp", std::make_shared<Group>());
    const int64_t wide = o.intermediate_size;
    const auto widening = [&](const char* name) {
      return mlp->register_module(name, Linear(o.hidden_size, wide, o.mlp_bias, memory));
    };
    const auto gate_proj = widening("gate_proj");
    gate_up_proj_ = JoinedLinears({gate_proj, widening("up_proj")});
    down_proj_ = mlp->register_module("down_proj", Linear(wide, o.hidden_size, o.mlp_bias, memory));
    input_norm_ = norm_weight("input_layernorm", o, memory);
    post_attention_norm_ = norm_weight("post_attention_layernorm", o, memory);
  }

  void join() const {
    qkv_proj_.join();
    gate_up_proj_.join();
  }

  /// Maps [batch, seq, hidden] to the same shape.
  torch::Tensor forward(const torch::Tensor& hidden, const Qwen2Call& call) {
    const auto [to_attend, skipped] = ddp::ops::rms_norm(hidden, input_norm_, eps_);
    const auto attended = o_proj_->forward_add(attention(to_attend, call), skipped);
    const auto [x, skipped_mlp] = ddp::ops::rms_norm(attended, post_attention_norm_, eps_);
    return down_proj_->forward_add(gate_up_proj_.forward_gated(x), skipped_mlp, call.skips_result);
  }

 private:
  torch::Tensor norm_weight(const char* name, const Qwen2Options& o,
                            const torch::TensorOptions& memory) {
    auto group = register_module(name, std::make_shared<Group>());
    return new_parameter(*group, "weight", {o.hidden_size}, memory);
  }
  torch::Tensor attention(const torch::Tensor& x, const Qwen2Call& call) {
    const auto [query, key, value] = ddp::ops::split_heads(qkv_proj_.forward(x), num_heads_,
                                                           num_kv_heads_, {.angles = call.angles});
    return attend(query, key, value, call, index_);
  }

  JoinedLinears qkv_proj_, gate_up_proj_;
  Linear o_proj_{nullptr}, down_proj_{nullptr};
  torch::Tensor input_norm_;
  torch::Tensor post_attention_norm_;
  int64_t num_heads_, num_kv_heads_;
  double eps_;
  std::size_t index_;
};

}  // namespace detail

namespace {

void check(const Qwen2Options& o) {
  detail::check_sizes("Qwen2", {{"vocab_size", o.vocab_size},
                                {"hidden_size", o.hidden_size},
                                {"intermediate_size", o.intermediate_size},
                                {"num_layers", o.num_layers},
                                {"num_heads", o.num_heads},
                                {"num_kv_heads", o.num_kv_heads},
                                {"head_dim", o.head_dim},
                                {"max_positions", o.max_positions}});
  if (o.head_dim % 2 != 0) {
    detail::refuse("Qwen2: head_dim = ", o.head_dim, ": rotary positions need an even number");
  }
  if (o.num_heads % o.num_kv_heads != 0) {
    detail::refuse("Qwen2: num_heads = ", o.num_heads,
                   " is not a multiple of num_kv_heads = ", o.num_kv_heads);
  }
}

Qwen2Options small(int64_t hidden, int64_t intermediate, int64_t layers, int64_t heads,
                   int64_t head_dim) {
  Qwen2Options o;
  o.vocab_size = 151936;
  o.hidden_size = hidden;
  o.intermediate_size = intermediate;
  o.num_layers = layers;
  o.num_heads = heads;
  o.num_kv_heads = 2;
  o.head_dim = head_dim;
  o.tie_word_embeddings = true;
  return o;
}

}  // namespace

Qwen2Options qwen2_0_5b() {
  return small(896, 4864, 24, 14, 64);
}
Qwen2Options qwen2_1_5b() {
  return small(1536, 8960, 28, 12, 128);
}
Qwen2Options qwen2_7b() {
  return {};
}

Qwen2Impl::Qwen2Impl(const Qwen2Options& options, const torch::TensorOptions& tensor_options)
    : options_(options) {
  check(options_);
  auto model = register_module("model", std::make_shared<detail::Group>());
  const auto table = [&](torch::nn::Module& owner, torch::IntArrayRef shape) {
    return detail::new_parameter(owner, "weight", shape, tensor_options);
  };
  auto embedding = model->register_module("embed_tokens", std::make_shared<detail::Group>());
  embed_tokens_ = table(*embedding, {options_.vocab_size, options_.hidden_size});
  auto layers = model->register_module("layers", std::make_shared<detail::Group>());
  for (int64_t i = 0; i < options_.num_layers; ++i) {
    layers_.push_back(layers->register_module(
        std::to_string(i), std::make_shared<detail::Qwen2Layer>(options_, tensor_options,
                                                                static_cast<std::size_t>(i))));
  }
  auto norm = model->register_module("norm", std::make_shared<detail::Group>());
  norm_ = table(*norm, {options_.hidden_size});
  if (!options_.tie_word_embeddings) {
    auto head = register_module("lm_head", std::make_shared<detail::Group>());
    lm_head_ = table(*head, {options_.vocab_size, options_.hidden_size});
  }
  auto head = head_weight();
  ddp::ops::pad_rows(head);
}

Qwen2Impl::~Qwen2Impl() = default;

void Qwen2Impl::arrange_weights() {
  LanguageModel::arrange_weights();
  for (const auto& layer : layers_) {
    layer->join();
  }
}

void Qwen2Impl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    auto& value = item.value();
    if (value.dim() == 2) {
      value.normal_(0, options_.initializer_range);
    } else {
      value.fill_(item.key().find("norm.weight") != std::string::npos ? 1 : 0);
    }
  }
}

const torch::Tensor& Qwen2Impl::head_weight() const {
  return lm_head_.defined() ? lm_head_ : embed_tokens_;
}

const ddp::ops::RotaryTables& Qwen2Impl::rotary_tables(int64_t num_positions) {
  const auto device = embed_tokens_.device();
  const auto known = std::find_if(rotary_.begin(), rotary_.end(), [&](const auto& tables) {
    return tables.cos.device() == device && tables.cos.size(0) >= num_positions;
  });
  if (known != rotary_.end()) {
    return *known;
  }
  // Covers the longest sequence so far: a table of 128k positions would exceed small models.
  int64_t size = std::min<int64_t>(options_.max_positions, 1024);
  while (size < num_positions) {
    size *= 2;
  }
  auto rope = options_.rope_scaling;
  rope.head_dim = options_.head_dim;
  rope.theta = options_.rope_theta;
  // No table is freed: CUDA graphs of shorter sequences keep reading the one of their capture. All
  // tables of a device together are smaller than twice the largest.
  return rotary_.emplace_back(ddp::ops::make_rotary_tables(rope, size, device));
}

int64_t Qwen2Impl::num_positions(const TokenInput& input, const KeyValueCache* cache) const {
  if (input.position_ids.defined()) {
    return options_.max_positions;  // only the device knows their values
  }
  if (input.document_offsets.defined()) {
    return input.max_document_length;
  }
  return input.input_ids.size(1) + (cache != nullptr ? cache->length : 0);
}

torch::Tensor Qwen2Impl::hidden_states(const TokenInput& input, KeyValueCache* cache) {
  detail::check_input(input, cache, options_.max_positions);
  const auto positions = detail::positions_of(input, cache);
  const auto angles =
      ddp::ops::rotary_angles(rotary_tables(num_positions(input, cache)), positions);
  const detail::Qwen2Call call{detail::layer_call(input, cache, computation_), angles};
  const auto hidden = detail::run_layers(layers_, torch::embedding(embed_tokens_, input.input_ids),
                                         call, computation_);
  return ddp::ops::rms_norm(hidden, norm_, options_.rms_norm_eps).normed;
}

KeyValueCache Qwen2Impl::make_cache(int64_t batch, int64_t max_length) const {
  return detail::new_cache(options_.num_layers,
                           {batch, options_.num_kv_heads, max_length, options_.head_dim},
                           embed_tokens_.options());
}

bool Qwen2Impl::is_matrix_product(const std::string& name) const {
  return options_.tie_word_embeddings || name != "model.embed_tokens.weight";
}

double Qwen2Impl::flops_per_token(int64_t seq_len) const {
  return matrix_flops_per_token() +
         detail::attention_flops_per_token(seq_len, options_.num_heads * options_.head_dim,
                                           options_.num_layers);
}

}  // namespace models
