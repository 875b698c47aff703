// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters (Hu et al., arXiv:2106.09685) on the linear layers of a model. The base is
// frozen; two thin matrices per layer are trained. Names and meaning are PEFT's:
// "<layer>.lora_A.weight" [rank, in] and "<layer>.lora_B.weight" [out, rank], scale alpha / rank,
// dropout on the branch's input. A is initialised by kaiming_uniform(sqrt(5)), B with zeros.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"

namespace models {

/// Settings of add_lora(); the defaults suit Qwen2 and Llama.
struct LoraOptions {
  int64_t rank = 64;      ///< of the update, > 0
  double alpha = 128;     ///< the update is scaled by alpha / rank
  double dropout = 0.05;  ///< of the branch's input, in training
  /// Shell patterns, matched against the last part of a linear layer's name or the full name.
  std::vector<std::string> target_modules = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                             "gate_proj", "up_proj", "down_proj"};
  torch::Dtype dtype = torch::kFloat32;  ///< dtype of A and B
  /// Multiply with the frozen weights of these layers in FP8: see ops::Fp8Weight. The weights keep
  /// their memory and dtype, and their FP8 copies take as much as bf16 weights. Copies follow
  /// changes of the weights in eager and captured steps; see refresh_fp8_base() for changes without
  /// a trace.
  bool fp8_base = false;
};

/// Converts all frozen weights of LoraOptions::fp8_base to FP8 again before their next use. Call it
/// after a change that PyTorch's version counter does not record: through weight.data(), or by a
/// pointer.
void refresh_fp8_base();

namespace detail {
/// A frozen weight's copy in FP8, made at the first use and again after the weight has changed.
class Fp8Copy {
 public:
  /// Of the rows of all `weights`. Throws std::runtime_error naming `layer` if they are not finite.
  const ddp::ops::Fp8Weight& of(torch::TensorList weights, const std::string& layer);

 private:
  class Current;
  std::shared_ptr<Current> current_;
};
}  // namespace detail

/// y = x Wᵀ + b, with torch.nn.Linear's names and initialisation, and an optional adapter.
class LinearImpl : public torch::nn::Module {
 public:
  /// Memory is not initialised: call reset_parameters(), or load weights.
  LinearImpl(int64_t in_features, int64_t out_features, bool with_bias,
             const torch::TensorOptions& tensor_options = {});
  torch::Tensor forward(const torch::Tensor& input);  ///< [..., in] -> [..., out]
  /// forward(input) + residual; without an adapter in one product. `skips_result` is that of
  /// ops::linear().
  torch::Tensor forward_add(const torch::Tensor& input, const torch::Tensor& residual,
                            bool skips_result = false);

  /// Freezes weight and bias and registers lora_A.weight and lora_B.weight. Both may be unfrozen
  /// afterwards, the weight without fp8_base only.
  void add_lora(const LoraOptions& options, const std::string& name = "");
  /// Adds scale * B A to the weight and removes the adapter.
  void merge_lora();
  bool has_lora() const { return lora_a.defined(); }  ///< after add_lora() and before merge_lora()
  double lora_scale() const { return lora_scale_; }   ///< alpha / rank
  double lora_alpha() const { return lora_alpha_; }   ///< LoraOptions::alpha
  double lora_dropout() const { return lora_dropout_; }  ///< LoraOptions::dropout
  /// Scale and, in training, dropout of the adapter.
  ddp::ops::LoraLinearOptions lora_call() const;
  bool has_fp8_base() const { return fp8_base_; }    ///< LoraOptions::fp8_base
  const std::string& name() const { return name_; }  ///< as add_lora() was told

  torch::Tensor weight;  ///< [out, in]
  torch::Tensor bias;    ///< [out]; undefined without a bias
  torch::Tensor lora_a;  ///< [rank, in]; undefined without an adapter
  torch::Tensor lora_b;  ///< [out, rank]

 private:
  double lora_alpha_ = 0;
  double lora_scale_ = 0;
  double lora_dropout_ = 0;
  bool fp8_base_ = false;
  std::string name_;
  detail::Fp8Copy fp8_;
};
TORCH_MODULE(Linear);

/// Linear layers that read the same input, such as q, k and v, computed as one. Their weights share
/// one memory, but stay the layers' own parameters with the layers' names.
class JoinedLinears {
 public:
  JoinedLinears() = default;
  /// At most three layers. Those without a common form (a bias in one of them) are computed one by
  /// one too.
  explicit JoinedLinears(std::vector<Linear> layers);
  /// The layers' results side by side. Layers with different adapters are computed one by one.
  torch::Tensor forward(const torch::Tensor& input) const { return compute(input, false); }
  /// swiglu(forward(input)), of gate and up.
  torch::Tensor forward_gated(const torch::Tensor& input) const { return compute(input, true); }
  /// Puts the weights into one memory again if they have left it; until then each call copies them.
  void join() const;

 private:
  torch::Tensor compute(const torch::Tensor& input, bool gated) const;

  std::vector<Linear> layers_;
  mutable detail::Fp8Copy fp8_;
};

/// Result of add_lora, for programs that print it.
struct LoraSummary {
  std::vector<std::string> layers;  ///< names of the layers with an adapter
  int64_t num_trainable = 0;        ///< elements of A and B
  int64_t num_frozen = 0;           ///< elements of all other parameters
};

/// Adds an adapter to every matching linear layer below `module` and freezes all other parameters.
/// Layers are models::Linear and those of a ddp::ops::LinearOwner, such as a ddp::ExportedModule
/// (not with fp8_base). Draws A from the default generator, layer by layer in order of
/// registration. Throws std::invalid_argument if a pattern matches nothing, a layer already has an
/// adapter, or the rank is not positive. Wrong options leave the module unchanged.
LoraSummary add_lora(torch::nn::Module& module, const LoraOptions& options);

/// Merges all adapters below `module`; the weights can then be saved as a full model. Throws
/// std::invalid_argument if another operator of an exported program reads an adapted weight too.
void merge_lora(torch::nn::Module& module);

}  // namespace models
