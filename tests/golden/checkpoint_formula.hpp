// SPDX-License-Identifier: Apache-2.0
// The model and the numbers of the files in tests/golden/checkpoints. make_checkpoint_golden.cpp,
// which wrote them, and the tests that load them share this header. All numbers are small multiples
// of powers of two, so every step that made them is exact on any CPU.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/state_dict.hpp"

namespace golden {

inline constexpr double kLr = 0.125;
inline constexpr double kMomentum = 0.5;
inline constexpr double kWeightDecay = 0.25;
inline constexpr double kBeta1 = 0.5;
inline constexpr double kBeta2 = 0.75;
inline constexpr double kEmaDecay = 0.5;
inline constexpr int64_t kSgdSteps = 3;
inline constexpr uint64_t kSeed = 99;  // plus the rank; three numbers are drawn before the save

/// Element `i` of an initial weight: a multiple of 1/4 from -4 to 3.75.
inline double value(int64_t i, int64_t salt) {
  return static_cast<double>((i * 7 + salt * 5) % 32 - 16) / 4;
}

/// Element `i` of a gradient: an odd multiple of 1/8 from -15/8 to 15/8.
inline double coefficient(int64_t i, int64_t salt) {
  return static_cast<double>(2 * ((i * 5 + salt * 3) % 16) - 15) / 8;
}

inline at::Tensor filled(at::IntArrayRef shape, const std::function<double(int64_t)>& element,
                         at::ScalarType dtype = at::kFloat) {
  auto result = at::empty(shape, at::kDouble);
  for (int64_t i = 0; i < result.numel(); ++i) {
    result.data_ptr<double>()[i] = element(i);
  }
  return result.to(dtype);
}

/// A parameter of Net. Its salt is its index in parameters().
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
};

inline const std::vector<Parameter>& parameters() {
  static const std::vector<Parameter> list{
      {"conv.weight", {4, 3, 3, 3}}, {"norm.weight", {4}}, {"norm.bias", {4}},
      {"fc.weight", {3, 5}},         {"fc.bias", {3}},     {"frozen.weight", {2, 3}}};
  return list;
}

inline bool is_frozen(const std::string& name) {
  return name.starts_with("frozen.");
}

/// The loss is the sum of all parameters times their coefficients, so the gradients are the
/// coefficients. One weight has channels_last memory, and one is frozen.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype) {
    register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).bias(false)));
    register_module("norm", torch::nn::BatchNorm2d(4));
    register_module("fc", torch::nn::Linear(5, 3));
    register_module("frozen", torch::nn::Linear(torch::nn::LinearOptions(3, 2).bias(false)));
    for (auto& item : named_parameters()) {
      const auto format =
          item.value().dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Preserve;
      item.value().set_data(item.value().to(dtype, false, false, format));
      item.value().set_requires_grad(!is_frozen(item.key()));
    }
    for (auto& item : named_buffers()) {
      if (item.value().is_floating_point()) {  // Module::to() would convert the counter too
        item.value().set_data(item.value().to(dtype));
      }
    }
  }
  /// The weights before the first step, and the buffers.
  void fill() {
    const torch::NoGradGuard no_grad;
    auto own = named_parameters();
    for (int64_t salt = 0; const auto& [name, shape] : golden::parameters()) {
      own[name].copy_(filled(shape, [&](int64_t i) { return value(i, salt); }));
      ++salt;
    }
    for (auto& item : named_buffers()) {
      item.value().copy_(buffer(item.key(), item.value().scalar_type()));
    }
  }
  /// The elements of "norm.running_mean", "norm.running_var" and "norm.num_batches_tracked".
  static at::Tensor buffer(const std::string& name, at::ScalarType dtype) {
    if (name == "norm.num_batches_tracked") {
      return at::scalar_tensor(int64_t{1} << 40, at::kLong);
    }
    const double offset = name == "norm.running_var" ? 8 : 0;
    return filled(
        {4}, [&](int64_t i) { return offset + value(i, 11); }, dtype);
  }
  /// `factor` multiplies the gradients.
  at::Tensor forward(double factor) {
    auto loss = at::zeros({});
    auto own = named_parameters();
    for (int64_t salt = 0; const auto& [name, shape] : golden::parameters()) {
      const auto gradient = filled(shape, [&](int64_t i) { return factor * coefficient(i, salt); });
      loss = loss + (own[name].to(at::kFloat) * gradient).sum();
      ++salt;
    }
    return loss;
  }
};
TORCH_MODULE(Net);

/// Parameters of the given sizes; the loss is their sum.
struct RowsImpl : torch::nn::Module {
  explicit RowsImpl(const std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      rows.push_back(register_parameter("row" + std::to_string(i), at::ones({sizes[i]})));
    }
  }
  at::Tensor forward() {
    auto loss = at::zeros({});
    for (const auto& row : rows) {
      loss = loss + row.sum();
    }
    return loss;
  }
  std::vector<at::Tensor> rows;
};
TORCH_MODULE(Rows);

/// The buckets of the first are measured, and those of the second are given.
inline const std::vector<int64_t> kMeasuredRows{64, 256, 1024};
inline const std::vector<int64_t> kGivenRows{32, 64, 128};
inline const std::string kMeasuredBuckets = "buckets of 3 gradients, 5376 bytes, hook none";
inline const std::string kGivenBuckets = "buckets of 3 gradients, 896 bytes, hook none";
inline const std::string kGivenChoice =
    R"({"bytes":896,"cuts":[1,2,3],"exposed_us":0.5,"gradients":3})";
inline const std::string kGivenKernels =
    R"({"a convolution":[7,2],"a product":[5,4]})";  // name: [proposed, chosen]

/// A parameter of optimizers that belong to no model: five elements, one dimension.
inline at::Tensor lone_parameter() {
  return filled({5}, [](int64_t i) { return value(i, 20); });
}
inline at::Tensor lone_gradient() {
  return filled({5}, [](int64_t i) { return coefficient(i, 20); });
}

/// The state of a program's own object on `rank`: every dtype, special numbers, every type of
/// value.
inline ddp::StateDict own_state(int rank) {
  const auto row = [](at::ScalarType dtype) {
    return filled(
        {2, 3}, [](int64_t i) { return value(i, 30); }, dtype);
  };
  ddp::StateDict state;
  for (const auto dtype : {at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                           at::kFloat, at::kDouble}) {
    state.tensors[std::string("row.") + at::toString(dtype)] = row(dtype);
  }
  state.tensors["row.Byte"] = row(at::kInt).abs().to(at::kByte);
  state.tensors["row.Bool"] = row(at::kFloat) > 0;
  constexpr auto kLowest = std::numeric_limits<int>::min();
  // -0, the smallest denormal, infinity, a NaN with a payload.
  state.tensors["special"] =
      at::tensor({kLowest, 1, 0x7F800000, 0x7FC01234}, at::kInt).view(at::kFloat);
  state.tensors["scalar"] = at::scalar_tensor(-0.375, at::kDouble);
  state.tensors["empty"] = at::empty({0, 3});
  state.tensors["rank_local.residual"] = filled({4}, [&](int64_t i) { return value(i, rank); });
  state.values = {{"flag", true},
                  {"lowest", std::numeric_limits<int64_t>::min()},
                  {"largest", std::numeric_limits<int64_t>::max()},
                  {"third", 1.0 / 3},
                  {"denormal", std::numeric_limits<double>::denorm_min()},
                  {"infinity", -std::numeric_limits<double>::infinity()},
                  {"nan", std::numeric_limits<double>::quiet_NaN()},
                  {"text", std::string("\xC3\xBC\"\\\n")},
                  {"empty_text", std::string()}};
  return state;
}

}  // namespace golden
