// SPDX-License-Identifier: Apache-2.0
// Common code of the tests of ddp/ops/vision.hpp: one call of each form with all its results.
#pragma once

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "ddp/ops/vision.hpp"

namespace batch_norm_test {

enum class Form {
  Relu,
  ReluTwoHandles,
  Residual,
  OneHandle,
  TwoNorms,
  TwoNormsOneHandle,
  Pool,
  PoolOneHandle,
  Plain,
  Silu
};

inline const std::vector<std::pair<std::string, Form>>& forms() {
  static const std::vector<std::pair<std::string, Form>> list = {
      {"relu(bn)", Form::Relu},
      {"relu(bn), two handles", Form::ReluTwoHandles},
      {"relu(bn + residual)", Form::Residual},
      {"relu(bn + residual), one handle", Form::OneHandle},
      {"relu(bn + bn2)", Form::TwoNorms},
      {"relu(bn + bn2), one handle", Form::TwoNormsOneHandle},
      {"pool(relu(bn))", Form::Pool},
      {"pool(relu(bn)), one handle", Form::PoolOneHandle},
      {"bn", Form::Plain},
      {"silu(bn)", Form::Silu}};
  return list;
}

/// x, z and the gradients of both handles, and all tensors of two layers.
struct Inputs {
  torch::Tensor x, z, grad, grad2;
  ddp::ops::BatchNormLayer bn, bn_z;
};

inline ddp::ops::BatchNormLayer make_layer(int64_t channels, torch::Device device,
                                           torch::Dtype dtype) {
  const auto options = torch::TensorOptions().device(device).dtype(dtype);
  ddp::ops::BatchNormLayer bn;
  bn.weight = torch::rand({channels}, options) + 0.5;
  bn.weight.slice(0, 1, channels, 3).neg_();  // relu(bn(x)) decreases with x there
  bn.weight[0] = 0;
  bn.bias = torch::randn({channels}, options) * 0.3;
  bn.running_mean = torch::randn({channels}, options);
  bn.running_var = torch::rand({channels}, options) + 0.5;
  bn.momentum = 0.3;
  return bn;
}

/// Activations whose channels differ in mean and spread, rounded to `dtype`.
inline Inputs make_inputs(torch::IntArrayRef shape, torch::Device device, torch::Dtype dtype,
                          torch::Dtype parameter_dtype = torch::kFloat) {
  const int64_t channels = shape[1];
  const auto wide = torch::TensorOptions().device(device).dtype(parameter_dtype);
  const auto activation = [&](double spread) {
    const auto centre = torch::randn({1, channels, 1, 1}, wide) * spread;
    const auto width = torch::rand({1, channels, 1, 1}, wide) + 0.2;
    return (torch::randn(shape, wide) * width + centre)
        .to(dtype)
        .contiguous(at::MemoryFormat::ChannelsLast);
  };
  return {activation(4),
          activation(1),
          activation(0),
          activation(0),
          make_layer(channels, device, parameter_dtype),
          make_layer(channels, device, parameter_dtype)};
}

inline ddp::ops::BatchNormLayer converted(const ddp::ops::BatchNormLayer& bn, torch::Dtype dtype) {
  auto copy = bn;
  for (auto* tensor : {&copy.weight, &copy.bias, &copy.running_mean, &copy.running_var}) {
    *tensor = tensor->detach().to(dtype).clone();
  }
  return copy;
}

/// The same numbers in another dtype and in separate memory.
inline Inputs converted(const Inputs& in, torch::Dtype dtype) {
  const auto copy = [&](const torch::Tensor& t) { return t.detach().to(dtype).clone(); };
  return {copy(in.x),
          copy(in.z),
          copy(in.grad),
          copy(in.grad2),
          converted(in.bn, dtype),
          converted(in.bn_z, dtype)};
}

using Named = std::vector<std::pair<std::string, torch::Tensor>>;

inline ddp::ops::Fork call(const Inputs& in, Form form) {
  switch (form) {
    case Form::Relu: {
      const auto y = ddp::ops::batch_norm_relu(in.x, in.bn);
      return {y, {}};
    }
    case Form::Plain:
      return {ddp::ops::batch_norm(in.x, in.bn), {}};
    case Form::Silu:
      return {ddp::ops::batch_norm_silu(in.x, in.bn), {}};
    case Form::ReluTwoHandles:
      return ddp::ops::batch_norm_relu_fork(in.x, in.bn);
    case Form::Residual:
    case Form::OneHandle:
      return ddp::ops::batch_norm_add_relu(in.x, in.bn, in.z);
    case Form::TwoNorms:
    case Form::TwoNormsOneHandle:
      return ddp::ops::batch_norm_add_relu(in.x, in.bn, in.z, in.bn_z);
    default:
      return ddp::ops::batch_norm_relu_max_pool(in.x, in.bn);
  }
}

inline bool one_handle(Form form) {
  return form == Form::Relu || form == Form::OneHandle || form == Form::TwoNormsOneHandle ||
         form == Form::PoolOneHandle || form == Form::Plain || form == Form::Silu;
}

/// Runs forward and backward; returns y, all gradients and the updated running estimates.
inline Named run(Inputs& in, Form form) {
  std::vector<std::pair<std::string, torch::Tensor>> leaves = {
      {"x", in.x}, {"weight", in.bn.weight}, {"bias", in.bn.bias}};
  const bool two = form == Form::TwoNorms || form == Form::TwoNormsOneHandle;
  if (two || form == Form::Residual || form == Form::OneHandle) {
    leaves.emplace_back("z", in.z);
  }
  if (two) {
    leaves.emplace_back("weight of z", in.bn_z.weight);
    leaves.emplace_back("bias of z", in.bn_z.bias);
  }
  for (auto& leaf : leaves) {
    leaf.second.requires_grad_(true);
    leaf.second.mutable_grad() = torch::Tensor();
  }
  const auto outputs = call(in, form);
  const auto& y = outputs.branch;
  const auto cut = [&](const torch::Tensor& grad) {
    return grad.narrow(2, 0, y.size(2))
        .narrow(3, 0, y.size(3))
        .contiguous(at::MemoryFormat::ChannelsLast);
  };
  if (one_handle(form)) {
    torch::autograd::backward({y}, {cut(in.grad)});
  } else {
    torch::autograd::backward({y, outputs.shortcut}, {cut(in.grad), cut(in.grad2)});
  }
  Named results = {{"y", y.detach()}};
  for (const auto& leaf : leaves) {
    results.emplace_back("gradient of " + leaf.first, leaf.second.grad());
  }
  results.emplace_back("running_mean", in.bn.running_mean);
  results.emplace_back("running_var", in.bn.running_var);
  if (two) {
    results.emplace_back("running_mean of z", in.bn_z.running_mean);
    results.emplace_back("running_var of z", in.bn_z.running_var);
  }
  return results;
}

}  // namespace batch_norm_test
