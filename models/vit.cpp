// SPDX-License-Identifier: Apache-2.0
#include "models/vit.hpp"

#include <torch/torch.h>

#include <charconv>
#include <cmath>

#include "ddp/ops/language.hpp"
#include "decoder_parts.hpp"
#include "encoder_block.hpp"

namespace models {
namespace {

using detail::refuse;

constexpr double kNormEps = 1e-6;

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
    const detail::EncoderBlockOptions block{.hidden_size = o.hidden_size,
                                            .intermediate_size = o.intermediate_size,
                                            .num_heads = o.num_heads,
                                            .norm_eps = kNormEps,
                                            .dropout = o.dropout,
                                            .attention_dropout = o.attention_dropout,
                                            .drop_path = o.stochastic_depth * depth,
                                            .first_token_only = is_last};
    blocks_.push_back(
        layers->register_module("encoder_layer_" + std::to_string(i),
                                std::make_shared<detail::EncoderBlock>(block, memory)));
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

// The distributions of torchvision/models/vision_transformer.py.
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
    } else if (!detail::reset_block_parameter(name, value)) {
      value.fill_(has(name, "ln.weight") ? 1 : 0);
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
      ddp::ops::layer_norm(hidden.flatten(0, 1), norm_weight_, norm_bias_, kNormEps).normed;
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
