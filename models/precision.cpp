// SPDX-License-Identifier: Apache-2.0
#include "models/precision.hpp"

#include <torch/torch.h>

#include <stdexcept>
#include <unordered_set>

#include "ddp/ops/vision.hpp"
#include "models/language_model.hpp"

namespace models {
namespace {

template <typename... Types>
bool is_any_of(const torch::nn::Module& module) {
  return (... || (dynamic_cast<const Types*>(&module) != nullptr));
}

bool is_torch_norm(const torch::nn::Module& module) {
  return is_any_of<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
                   torch::nn::BatchNorm3dImpl, torch::nn::GroupNormImpl, torch::nn::LayerNormImpl,
                   torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl,
                   torch::nn::InstanceNorm3dImpl>(module);
}

/// Norms and all modules inside them.
std::unordered_set<const torch::nn::Module*> norms_of(torch::nn::Module& root) {
  std::unordered_set<const torch::nn::Module*> norms;
  const auto add = [&](torch::nn::Module& norm) {
    norms.insert(&norm);
    for (const auto& child : norm.modules(/*include_self=*/false)) {
      norms.insert(child.get());
    }
  };
  root.apply([&](torch::nn::Module& module) {
    if (is_torch_norm(module)) {
      add(module);
    }
    if (auto* owner = dynamic_cast<ddp::ops::NormOwner*>(&module)) {
      for (const auto& name : owner->norm_names()) {
        add(*owner->norm(name));
      }
    }
  });
  return norms;
}

}  // namespace

torch::Tensor as_weights(const torch::Tensor& input, const torch::Tensor& weight) {
  const auto dtype = weight.scalar_type();
  return dtype == torch::kBFloat16 || dtype == torch::kHalf ? input.to(dtype) : input;
}

void to_half_but_norms(torch::nn::Module& module, c10::ScalarType dtype) {
  if (dtype != torch::kBFloat16 && dtype != torch::kHalf) {
    throw std::invalid_argument(std::string("to_half_but_norms: dtype ") + c10::toString(dtype) +
                                " is neither bfloat16 nor float16");
  }
  const torch::NoGradGuard no_grad;
  const auto norms = norms_of(module);
  const auto convert = [&](torch::Tensor tensor) {
    if (tensor.is_floating_point()) {
      tensor.set_data(tensor.to(dtype));
    }
  };
  module.apply([&](torch::nn::Module& part) {
    if (norms.count(&part) == 0) {
      for (auto& parameter : part.parameters(/*recurse=*/false)) {
        convert(parameter);
      }
      for (auto& buffer : part.buffers(/*recurse=*/false)) {
        convert(buffer);
      }
    }
  });
  for (const auto& part : module.modules()) {
    if (auto* const model = dynamic_cast<LanguageModel*>(part.get())) {
      model->arrange_weights();
    }
  }
}

}  // namespace models
