// SPDX-License-Identifier: Apache-2.0
#include "models/vit.hpp"

#include <torch/torch.h>

#include <charconv>
#include <cmath>
#include <tuple>

#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"

namespace models {
namespace detail {
namespace {

constexpr double kNormEps = 1e-6;

struct VitLinear {
  torch::Tensor weight;
  torch::Tensor bias;

  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& residual = {}) const {
    return ddp::ops::linear(x, weight, {.bias = bias, .residual = residual});
  }
  /// x weightᵀ, for an op that adds the bias.
  torch::Tensor product(const torch::Tensor& x) const { return ddp::ops::linear(x, weight); }
};

/// `weight` and `bias` in a child `name` of `owner`.
VitLinear new_pair(torch::nn::Module& owner, const char* name, torch::IntArrayRef weight,
                   const torch::TensorOptions& memory) {
  auto group = std::make_shared<Group>();
  owner.register_module(name, group);
  return {new_parameter(*group, "weight", weight, memory),
          new_parameter(*group, "bias", {weight[0]}, memory)};
}

struct VitBlockOptions {
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_heads;
  double dropout;
  double attention_dropout;
  double drop_path;  ///< probability that a sample skips a branch
  bool is_last;
};

/// The end of a residual branch: `value`, and what the op that adds the residual still applies.
struct VitBranch {
  torch::Tensor value;
  ddp::ops::BranchOptions rest{};
};

}  // namespace

class VitBlock : public torch::nn::Module {
 public:
  VitBlock(const VitBlockOptions& o, const torch::TensorOptions& memory) : options_(o) {
    const int64_t dim = o.hidden_size;
    std::tie(ln_1_weight_, ln_1_bias_) = new_norm("ln_1", memory);
    auto attention = register_module("self_attention", std::make_shared<Group>());
    in_proj_ = {new_parameter(*attention, "in_proj_weight", {3 * dim, dim}, memory),
                new_parameter(*attention, "in_proj_bias", {3 * dim}, memory)};
    out_proj_ = new_pair(*attention, "out_proj", {dim, dim}, memory);
    std::tie(ln_2_weight_, ln_2_bias_) = new_norm("ln_2", memory);
    auto mlp = register_module("mlp", std::make_shared<Group>());
    widen_ = new_pair(*mlp, "0", {o.intermediate_size, dim}, memory);
    narrow_ = new_pair(*mlp, "3", {dim, o.intermediate_size}, memory);
  }

  /// Maps [batch, seq, hidden] to the same shape, or in the last block to the class token's
  /// [batch, 1, hidden]: the classifier reads no other.
  torch::Tensor forward(const torch::Tensor& hidden) {
    auto [to_attend, skipped] = ddp::ops::layer_norm(hidden, ln_1_weight_, ln_1_bias_, kNormEps);
    if (options_.is_last) {
      skipped = skipped.narrow(1, 0, 1).contiguous();
    }
    const auto attended = end(out_proj_.product(attention(to_attend)), out_proj_.bias);
    const auto [to_widen, skipped_mlp] = ddp::ops::add_layer_norm(
        attended.value, skipped, ln_2_weight_, ln_2_bias_, kNormEps, attended.rest);
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

 private:
  std::pair<torch::Tensor, torch::Tensor> new_norm(const char* name,
                                                   const torch::TensorOptions& memory) {
    auto norm = new_pair(*this, name, {options_.hidden_size}, memory);
    return {norm.weight, norm.bias};
  }

  double dropout() const { return is_training() ? options_.dropout : 0.0; }
  double drop_path() const { return is_training() ? options_.drop_path : 0.0; }

  torch::Tensor attention(const torch::Tensor& x) const {
    auto [query, key, value] = ddp::ops::split_heads(
        ddp::ops::linear(x, in_proj_.weight, {.bias = in_proj_.bias.detach()}), options_.num_heads,
        options_.num_heads, {.added_bias = in_proj_.bias});
    ddp::ops::AttentionOptions attention{
        .is_causal = false, .dropout_p = is_training() ? options_.attention_dropout : 0.0};
    if (options_.is_last) {
      // cuDNN's kernel is made for many queries.
      query = query.narrow(1, 0, 1);
      attention.shapes_recur = false;
    }
    return ddp::ops::attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                               attention)
        .transpose(1, 2)
        .reshape({x.size(0), query.size(1), options_.hidden_size});
  }

  /// Stochastic depth scales the whole branch, so bias and dropout must come before it. Without it
  /// the op that adds the residual applies both in its own pass.
  VitBranch end(const torch::Tensor& product, const torch::Tensor& bias) const {
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

  VitBlockOptions options_;
  torch::Tensor ln_1_weight_, ln_1_bias_, ln_2_weight_, ln_2_bias_;
  VitLinear in_proj_, out_proj_, widen_, narrow_;
};

}  // namespace detail

namespace {

using detail::refuse;

void check_probability(const char* name, double value) {
  if (!(value >= 0 && value < 1)) {
    refuse("ViT: ", name, " = ", value, ": it must be at least 0 and below 1");
  }
}

void check(const VitOptions& o) {
  detail::check_sizes("ViT", {{"image_size", o.image_size},
                              {"patch_size", o.patch_size},
                              {"num_classes", o.num_classes},
                              {"hidden_size", o.hidden_size},
                              {"num_layers", o.num_layers},
                              {"num_heads", o.num_heads},
                              {"intermediate_size", o.intermediate_size}});
  if (o.image_size % o.patch_size != 0) {
    refuse("ViT: image_size = ", o.image_size, " is not a multiple of patch_size = ", o.patch_size);
  }
  if (o.hidden_size % o.num_heads != 0) {
    refuse("ViT: hidden_size = ", o.hidden_size, " is not a multiple of num_heads = ", o.num_heads);
  }
  check_probability("dropout", o.dropout);
  check_probability("attention_dropout", o.attention_dropout);
  check_probability("stochastic_depth", o.stochastic_depth);
}

VitOptions completed(VitOptions options) {
  if (options.intermediate_size == 0) {
    options.intermediate_size = 4 * options.hidden_size;
  }
  check(options);
  return options;
}

/// Patches [batch, patches, 3 * patch * patch] in row-major order. A patch's values lie in the
/// order of a convolution's weight, so the patch projection is a matrix product.
torch::Tensor unfold(const torch::Tensor& images, int64_t patch) {
  const int64_t batch = images.size(0), channels = images.size(1);
  const int64_t rows = images.size(2) / patch, columns = images.size(3) / patch;
  return images.unflatten(2, {rows, patch})
      .unflatten(4, {columns, patch})
      .permute({0, 2, 4, 1, 3, 5})
      .reshape({batch, rows * columns, channels * patch * patch});
}

}  // namespace

VitImpl::VitImpl(const VitOptions& options, const torch::TensorOptions& tensor_options)
    : options_(completed(options)) {
  const auto& o = options_;
  const auto& memory = tensor_options;
  const auto projection =
      detail::new_pair(*this, "conv_proj", {o.hidden_size, 3, o.patch_size, o.patch_size}, memory);
  patch_weight_ = projection.weight;
  patch_bias_ = projection.bias;
  class_token_ = detail::new_parameter(*this, "class_token", {1, 1, o.hidden_size}, memory);
  auto encoder = register_module("encoder", std::make_shared<detail::Group>());
  positions_ =
      detail::new_parameter(*encoder, "pos_embedding", {1, seq_len(), o.hidden_size}, memory);
  auto layers = encoder->register_module("layers", std::make_shared<detail::Group>());
  for (int64_t i = 0; i < o.num_layers; ++i) {
    const bool is_last = i == o.num_layers - 1;
    const double depth =
        i == 0 ? 0.0 : static_cast<double>(i) / static_cast<double>(o.num_layers - 1);
    const detail::VitBlockOptions block{.hidden_size = o.hidden_size,
                                        .intermediate_size = o.intermediate_size,
                                        .num_heads = o.num_heads,
                                        .dropout = o.dropout,
                                        .attention_dropout = o.attention_dropout,
                                        .drop_path = o.stochastic_depth * depth,
                                        .is_last = is_last};
    blocks_.push_back(layers->register_module("encoder_layer_" + std::to_string(i),
                                              std::make_shared<detail::VitBlock>(block, memory)));
  }
  const auto norm = detail::new_pair(*encoder, "ln", {o.hidden_size}, memory);
  norm_weight_ = norm.weight;
  norm_bias_ = norm.bias;
  auto heads = register_module("heads", std::make_shared<detail::Group>());
  const auto head = detail::new_pair(*heads, "head", {o.num_classes, o.hidden_size}, memory);
  head_weight_ = head.weight;
  head_bias_ = head.bias;
  reset_parameters();
}

VitImpl::~VitImpl() = default;

// The distributions of torchvision/models/vision_transformer.py, and for attention those of
// torch.nn.MultiheadAttention and torch.nn.Linear.
void VitImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  const auto has = [](const std::string& name, const char* part) {
    return name.find(part) != std::string::npos;
  };
  for (auto& item : named_parameters()) {
    auto& value = item.value();
    const auto& name = item.key();
    if (has(name, "conv_proj.weight")) {
      // torchvision cuts this normal at ±2, beyond 3 standard deviations even for one-pixel
      // patches (14 for patches of 4 x 4).
      value.normal_(0, std::sqrt(1.0 / static_cast<double>(value[0].numel()))).clamp_(-2, 2);
    } else if (has(name, "pos_embedding")) {
      value.normal_(0, 0.02);
    } else if (has(name, "in_proj_weight") || (has(name, ".mlp.") && value.dim() == 2)) {
      torch::nn::init::xavier_uniform_(value);
    } else if (has(name, ".mlp.")) {
      value.normal_(0, 1e-6);
    } else if (has(name, "out_proj.weight")) {
      const double bound = 1 / std::sqrt(static_cast<double>(value.size(1)));
      value.uniform_(-bound, bound);
    } else {
      value.fill_(has(name, "ln") && has(name, ".weight") ? 1 : 0);
    }
  }
}

int64_t VitImpl::seq_len() const {
  const int64_t patches = options_.image_size / options_.patch_size;
  return 1 + patches * patches;
}

void VitImpl::check_images(const torch::Tensor& images) const {
  const int64_t size = options_.image_size;
  if (images.dim() != 4 || images.size(1) != 3 || images.size(2) != size ||
      images.size(3) != size) {
    refuse("ViT: the images are ", images.sizes(), ", but the model needs [batch, 3, ", size, ", ",
           size, "]; fix: resize them, or set image_size");
  }
}

torch::Tensor VitImpl::embed(const torch::Tensor& images) const {
  const auto dtype = patch_weight_.scalar_type();
  const bool half = dtype == torch::kBFloat16 || dtype == torch::kHalf;
  const auto patches = unfold(half ? images.to(dtype) : images, options_.patch_size);
  const auto embedded = ddp::ops::linear(patches, patch_weight_.flatten(1), {.bias = patch_bias_});
  const auto class_token = class_token_.expand({images.size(0), -1, -1});
  auto hidden = torch::cat({class_token, embedded}, 1) + positions_;
  if (options_.dropout > 0 && is_training()) {
    hidden = ddp::ops::dropout(hidden, options_.dropout);
  }
  return hidden;
}

torch::Tensor VitImpl::forward(const torch::Tensor& images) {
  check_images(images);
  auto hidden = embed(images);
  for (const auto& block : blocks_) {
    hidden = block->forward(hidden);
  }
  const auto normed =
      ddp::ops::layer_norm(hidden.flatten(0, 1), norm_weight_, norm_bias_, detail::kNormEps).normed;
  return ddp::ops::linear(normed, head_weight_, {.bias = head_bias_});
}

VitOptions vit_options(const std::string& name) {
  struct Size {
    const char* name;
    int64_t hidden_size, num_layers, num_heads;
  };
  static constexpr Size kSizes[] = {{"vit_ti_", 192, 12, 3},
                                    {"vit_s_", 384, 12, 6},
                                    {"vit_b_", 768, 12, 12},
                                    {"vit_l_", 1024, 24, 16}};
  for (const auto& size : kSizes) {
    const std::string prefix = size.name;
    if (name.compare(0, prefix.size(), prefix) != 0) {
      continue;
    }
    int64_t patch = 0;
    const auto* begin = name.data() + prefix.size();
    const auto* end = name.data() + name.size();
    if (const auto parsed = std::from_chars(begin, end, patch);
        parsed.ec == std::errc() && parsed.ptr == end && patch > 0) {
      return {.patch_size = patch,
              .hidden_size = size.hidden_size,
              .num_layers = size.num_layers,
              .num_heads = size.num_heads};
    }
  }
  refuse("no ViT is called \"", name,
         "\"; there are vit_ti_16, vit_s_16, vit_b_16 and vit_l_16, or another patch size for 16");
}

}  // namespace models
