// SPDX-License-Identifier: Apache-2.0
// Parameters of 16 bits and float32 twins, which the same rule updates. The masters of the first
// must have the twins' bits at any time.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

namespace optim_test {

/// NaNs are equal to each other; 0 and -0 are not.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.view(tensor.element_size() == 2 ? at::kShort : at::kInt);
  };
  return a.scalar_type() == b.scalar_type() &&
         bits(a).eq(bits(b)).logical_or(a.isnan().logical_and(b.isnan())).all().item<bool>();
}

/// How other code than the optimizer writes a parameter.
enum class Writer { Copy, Data, RawMemory, NewMemory, SameMemory };

inline void write(at::Tensor& parameter, const at::Tensor& values, Writer writer) {
  const at::NoGradGuard no_grad;
  switch (writer) {
    case Writer::Copy:
      parameter.copy_(values);
      break;
    case Writer::Data:
      parameter.variable_data().copy_(values);
      break;
    case Writer::RawMemory:  // LibTorch does not know that this is the parameter's memory
      at::from_blob(parameter.data_ptr(), parameter.sizes(), parameter.strides(),
                    parameter.options().requires_grad(false))
          .copy_(values);
      break;
    case Writer::NewMemory:
      parameter.set_data(values.clone());
      break;
    case Writer::SameMemory:
      parameter.set_data(parameter.detach().as_strided(parameter.sizes(), parameter.strides()));
      parameter.copy_(values);
  }
}

inline ddp::OptimizerOptions twin_rule(ddp::OptimizerType type,
                                       ddp::OptimizerImplementation implementation) {
  ddp::OptimizerOptions options;
  options.type = type;
  options.momentum = type == ddp::OptimizerType::Lars ? 0.9 : 0.0;
  options.weight_decay = type == ddp::OptimizerType::Sgd ? 0.0 : 0.01;
  options.trust_coefficient = 0.125;
  options.adapt_norm_and_bias = true;
  options.implementation = implementation;
  return options;
}

struct MasterTwins {
  /// With `special` values some weights are infinite, NaN, -0, denormal or the largest number.
  MasterTwins(at::Device device, at::ScalarType dtype, const ddp::OptimizerOptions& options,
              bool special = false)
      : has_special(special) {
    const at::Tensor storage = values({1001}, 2, dtype, special).to(device);
    const std::vector<at::Tensor> leaves{
        values({8, 5, 3, 3}, 0, dtype, special)
            .to(device)
            .contiguous(at::MemoryFormat::ChannelsLast),
        values({2500}, 1, dtype, special).to(device),
        storage.narrow(0, 3, 997).detach(),  // not aligned to four elements
        values({1}, 3, dtype, false).to(device)};
    for (size_t k = 0; k < leaves.size(); ++k) {
      const std::string name = "w" + std::to_string(k);
      half.push_back({name, leaves[k].requires_grad_()});
      full.push_back({name, leaves[k].detach().to(at::kFloat).requires_grad_()});
      scales.push_back(
          full[k].tensor.detach().abs().nan_to_num(1.0, 1.0, 1.0).clamp(smallest(dtype), 0x1p124));
      gradients.push_back(at::zeros_like(full[k].tensor.detach()));
    }
    of_half = ddp::make_optimizer(half, options);
    of_full = ddp::make_optimizer(full, options);
  }

  /// Updates at rate 2^-13 are smaller than the distance of two numbers of 16 bits.
  void load_gradients(int64_t step) {
    for (size_t k = 0; k < half.size(); ++k) {
      const at::Tensor own = gradient(gradients[k].sizes(), static_cast<int64_t>(k), step);
      gradients[k].copy_(own.to(scales[k].device()) * scales[k]);
      half[k].tensor.mutable_grad() = gradients[k];
      full[k].tensor.mutable_grad() = gradients[k];
    }
  }

  void step(int64_t step, const ddp::StepScalars& scalars = {.lr = 0x1p-13}) {
    load_gradients(step);
    of_half->step(scalars);
    of_full->step(scalars);
  }

  /// Writes other numbers into a third of every parameter, and the same numbers into the rest.
  void write_some(Writer writer) {
    for (size_t k = 0; k < half.size(); ++k) {
      at::Tensor& leaf = half[k].tensor;
      const at::Tensor index =
          at::arange(leaf.numel(), leaf.options().dtype(at::kLong).requires_grad(false))
              .view(leaf.sizes());
      const at::Tensor given = leaf.detach().clone();  // with the leaf's strides
      given.copy_(at::where(index.remainder(3).eq(0), given * 2 + 0.25, given));
      if (has_special) {
        given.masked_fill_(index.eq(7), kNan);
      }
      const at::Tensor twin = full[k].tensor.detach();
      twin.copy_(at::where(given.ne(leaf.detach()), given.to(at::kFloat), twin));
      write(leaf, given, writer);
    }
  }

  void check_masters() const {
    const ddp::StateDict state = of_half->state_dict();
    for (const auto& [name, tensor] : full) {
      INFO(name);
      CHECK(same_bits(state.tensors.at("state." + name + ".master"), tensor.detach()));
    }
  }

  void check() const {
    check_masters();
    for (size_t k = 0; k < half.size(); ++k) {
      INFO(half[k].name);
      const at::Tensor& leaf = half[k].tensor;
      CHECK(same_bits(leaf.detach(), full[k].tensor.detach().to(leaf.scalar_type())));
    }
  }

  /// 100 updates, compared after each.
  void run_alone() {
    for (int64_t i = 0; i < 100; ++i) {
      step(i);
      check();
    }
  }

  /// Other code writes before an update, before a state that is saved between two updates, and
  /// before a skipped update.
  void run_with_writers() {
    int64_t at = 0;
    for (const auto writer :
         {Writer::Copy, Writer::Data, Writer::RawMemory, Writer::NewMemory, Writer::SameMemory}) {
      CAPTURE(static_cast<int>(writer));
      for (int i = 0; i < 3; ++i) {
        step(at++);
      }
      check();
      write_some(writer);
      step(at++);
      check();
      write_some(writer);
      check_masters();
      write_some(writer);
      step(at++, {.lr = 0x1p-13, .found_inf = 1.0});
      step(at++);
      check();
    }
  }

  bool has_special;
  ddp::NamedParameters half;
  ddp::NamedParameters full;
  std::vector<at::Tensor> scales;
  std::vector<at::Tensor> gradients;  // in the same memory in every step
  std::unique_ptr<ddp::Optimizer> of_half;
  std::unique_ptr<ddp::Optimizer> of_full;

 private:
  static constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

  static double smallest(at::ScalarType dtype) {
    return dtype == at::kBFloat16 ? 0x1p-133 : 0x1p-24;
  }

  static at::Tensor values(at::IntArrayRef shape, int64_t k, at::ScalarType dtype, bool special) {
    at::Tensor tensor = weights(shape, k).detach().to(dtype);
    if (special) {
      const double infinity = std::numeric_limits<double>::infinity();
      const double largest = dtype == at::kBFloat16 ? 0x1.FEp127 : 65504.0;
      const std::vector<double> numbers{
          infinity, -infinity, kNan, -0.0, 0.0, smallest(dtype), -9 * smallest(dtype), largest};
      for (size_t i = 0; i < numbers.size(); ++i) {
        tensor.view(-1).narrow(0, static_cast<int64_t>(i) * 5, 5).fill_(numbers[i]);
      }
    }
    return tensor;
  }
};

}  // namespace optim_test
