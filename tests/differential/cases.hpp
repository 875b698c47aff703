// SPDX-License-Identifier: Apache-2.0
// Random cases of ops, each with a twin: the op's definition by ATen, which runs in float64.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace differential {

using Tensors = std::vector<torch::Tensor>;

/// The choices of one case. Equal seeds give equal cases.
class Draw {
 public:
  Draw(uint64_t seed, at::Device device);

  at::Device device() const { return device_; }
  int64_t number(int64_t first, int64_t last);  ///< both included
  bool chance(double share);
  template <typename T>
  T one_of(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(number(0, static_cast<int64_t>(choices.size()) - 1))];
  }
  /// Often a multiple of 8, which most kernels need; else any number up to `last`.
  int64_t size(int64_t last);
  torch::Dtype dtype();  ///< of activations
  /// Normal numbers in a random layout: dense, behind an offset, a slice, or with other strides.
  torch::Tensor normal(torch::IntArrayRef sizes, torch::Dtype dtype, double scale = 1);
  torch::Tensor dense(torch::IntArrayRef sizes, torch::Dtype dtype, double scale = 1);
  /// Labels in [0, classes), of which some are `ignored`.
  torch::Tensor labels(int64_t count, int64_t classes, int64_t ignored = -100);

 private:
  torch::Tensor with_layout(const torch::Tensor& values);

  std::mt19937_64 choices_;
  at::Generator numbers_;
  at::Device device_;
};

/// The same numbers at the same offset and strides of other memory.
torch::Tensor copy_with_layout(const torch::Tensor& tensor);

/// The relative error that one rounding to `dtype` and float32 sums may cause, with some margin.
double rounding_of(torch::Dtype dtype);

template <typename... Args>
std::string text_of(const Args&... args) {
  std::ostringstream out;
  ((out << args << ' '), ...);
  return out.str();
}

/// One case of an op.
struct Case {
  using Call = std::function<Tensors(const Tensors&)>;

  Tensors inputs = {};                  ///< leaves with a gradient
  std::vector<bool> is_parameter = {};  ///< of each input
  Call op = {};                         ///< gets the inputs
  Call twin = {};                       ///< gets them in float64
  double tolerance = 0;                 ///< of |op - twin| / max(|twin|, floor * sqrt(elements))
  double floor = 1e-2;                  ///< results may cancel: of numbers near 1
  bool autocast = false;                ///< the op runs under autocast to bfloat16
  bool draws = false;                   ///< the op drops; the twin knows the masks of kMaskSeed
  std::string text = {};                ///< the choices, for messages

  std::size_t add(const torch::Tensor& values, bool parameter = false) {
    inputs.push_back(values.detach().requires_grad_(true));
    is_parameter.push_back(parameter);
    return inputs.size() - 1;
  }
};

/// Seed of the default generators before a call that drops.
constexpr uint64_t kMaskSeed = 77;

/// An optional input: its place among the inputs, or none.
struct Place {
  int64_t index = -1;
  torch::Tensor of(const Tensors& inputs) const {
    return index < 0 ? torch::Tensor() : inputs[static_cast<std::size_t>(index)];
  }
};

struct Row {
  const char* name;
  Case (*make)(Draw& draw);
};
const std::vector<Row>& language_rows();
const std::vector<Row>& vision_rows();

/// Runs the case eagerly, under the wrapper and recomputed. Returns the first difference that
/// exceeds the tolerance, else an empty text; `worst` is the largest error by its tolerance.
std::string check(const Case& one, Draw& draw, double* worst);

/// Trains a few parameters with the optimizer of this seed, alone, under the wrapper and with
/// ZeRO-1, and returns the first difference from float64.
std::string check_optimizer(Draw& draw, std::string* text, double* worst);

/// |a - b| / max(|b|, floor * sqrt(elements)) in float64.
double error_of(const torch::Tensor& a, const torch::Tensor& b, double floor);

}  // namespace differential
