// SPDX-License-Identifier: Apache-2.0
// Vision Transformer (Dosovitskiy et al., arXiv:2010.11929) as torchvision defines it: pre-norm
// blocks, exact GELU, a class token whose last hidden state is classified. The sizes Ti and S are
// DeiT's (Touvron et al., arXiv:2012.12877).
//
// Parameter names, shapes and the distribution of initial weights are torchvision's. Weights can be
// exchanged both ways.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace models {

/// The defaults are ViT-B/16's (86.6M).
struct VitOptions {
  int64_t image_size = 224;       ///< height and width of all images, in pixels
  int64_t patch_size = 16;        ///< a divisor of image_size
  int64_t num_classes = 1000;     ///< width of the logits
  int64_t hidden_size = 768;      ///< width; a multiple of num_heads
  int64_t num_layers = 12;        ///< encoder blocks
  int64_t num_heads = 12;         ///< of the attention
  int64_t intermediate_size = 0;  ///< 0: 4 * hidden_size
  double dropout = 0;             ///< of embeddings, residual branches and inside the MLP
  double attention_dropout = 0;   ///< of the attention weights
  /// Probability that a sample skips the last block's residual branches (arXiv:1603.09382). It
  /// grows linearly over the blocks from 0, as in DeiT.
  double stochastic_depth = 0;
};

namespace detail {
class EncoderBlock;
}

/// Input [batch, 3, image_size, image_size] in any memory format, output logits [batch,
/// num_classes]. Weights of 16 bits cast the images to their dtype, and logits have it too.
class VitImpl : public torch::nn::Module {
 public:
  /// Creates and initialises parameters with `tensor_options` (device, dtype). Throws
  /// std::invalid_argument if the sizes do not fit together.
  explicit VitImpl(const VitOptions& options = {}, const torch::TensorOptions& tensor_options = {});
  ~VitImpl() override;

  /// torchvision's initialisation. The head starts at zero, so the first logits are zero.
  void reset_parameters();

  /// Throws std::invalid_argument if the images have another size.
  torch::Tensor forward(const torch::Tensor& images);
  /// Patches and the class token.
  int64_t seq_len() const;
  const VitOptions& options() const { return options_; }  ///< as given to the constructor

 private:
  void check_images(const torch::Tensor& images) const;
  /// Returns the first block's input, [batch, seq, hidden].
  torch::Tensor embed(const torch::Tensor& images) const;

  VitOptions options_;
  torch::Tensor patch_weight_;  // conv_proj.weight [hidden, 3, patch, patch]
  torch::Tensor patch_bias_;
  torch::Tensor class_token_;  // [1, 1, hidden]
  torch::Tensor positions_;    // encoder.pos_embedding [1, seq, hidden]
  std::vector<std::shared_ptr<detail::EncoderBlock>> blocks_;
  torch::Tensor norm_weight_;  // encoder.ln
  torch::Tensor norm_bias_;
  torch::Tensor head_weight_;  // heads.head
  torch::Tensor head_bias_;
};
TORCH_MODULE(Vit);

/// Sets hidden_size, num_layers and num_heads by name: "vit_ti", "vit_s", "vit_b" or "vit_l", with
/// "_" and a patch size, as in "vit_b_16". Throws std::invalid_argument that lists the names.
VitOptions vit_options(const std::string& name);

}  // namespace models
