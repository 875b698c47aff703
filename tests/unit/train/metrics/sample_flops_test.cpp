// SPDX-License-Identifier: Apache-2.0
// FLOPs per sample and the peak of their precision.
#include "train/metrics/sample_flops.hpp"

#include <torch/torch.h>

#include <limits>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

using ddp::detail::SampleFlops;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

void product() {
  torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));  // 48 FLOP
}

// Sets what float32 may be computed as, and restores it.
class Tf32 {
 public:
  Tf32(bool cublas, bool cudnn) { set(cublas, cudnn); }
  ~Tf32() { set(cublas_before_, cudnn_before_); }
  Tf32(const Tf32&) = delete;
  Tf32& operator=(const Tf32&) = delete;

 private:
  static void set(bool cublas, bool cudnn) {
    at::globalContext().setAllowTF32CuBLAS(cublas);
    at::globalContext().setAllowTF32CuDNN(cudnn);
  }
  const bool cublas_before_ = at::globalContext().allowTF32CuBLAS();
  const bool cudnn_before_ = at::globalContext().allowTF32CuDNN();
};

double peak_of(void (*work)(), const char* gpu_name) {
  SampleFlops flops(0);
  flops.end_step(8, gpu_name);
  work();
  flops.end_step(8, gpu_name);
  return flops.peak_tflops().value_or(0);
}

void convolution() {
  torch::conv1d(torch::randn({2, 4, 9}), torch::randn({5, 4, 3}));
}

}  // namespace

TEST_CASE("the library that computes float32 decides about the peak of TF32") {
  {
    const Tf32 cudnn_only(false, true);
    CHECK(peak_of(product, "NVIDIA H200") == 66.9);
    CHECK(peak_of(convolution, "NVIDIA H200") == 494.7);
    CHECK(peak_of(convolution, "Tesla V100-SXM2-16GB") == 15.7);
  }
  const Tf32 cublas_only(true, false);
  CHECK(peak_of(product, "NVIDIA H200") == 494.7);
  CHECK(peak_of(convolution, "NVIDIA H200") == 66.9);
}

TEST_CASE("LibTorch's newer settings of float32 decide, too") {
  const Tf32 neither(false, false);
  auto& context = at::globalContext();
  const auto product_and_back = [&](at::Float32Precision precision) {
    const auto set = [&](at::Float32Precision value) {
      context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, value);
    };
    set(precision);
    const double peak = peak_of(product, "NVIDIA H200");
    set(at::Float32Precision::IEEE);
    return peak;
  };
  CHECK(product_and_back(at::Float32Precision::TF32) == 494.7);
  CHECK(product_and_back(at::Float32Precision::IEEE) == 66.9);
}

TEST_CASE("a second step without samples leaves the count to the first that has some") {
  SampleFlops flops(1);
  product();
  CHECK_FALSE(flops.end_step(0, ""));
  product();
  CHECK_FALSE(flops.end_step(0, ""));
  product();
  CHECK(flops.end_step(4, ""));
  product();
  CHECK_FALSE(flops.end_step(4, ""));
  CHECK(flops.per_sample() == 12);
}

TEST_CASE("a step counts once no other object counts") {
  SampleFlops other(1), flops(1);
  other.end_step(4, "");
  flops.end_step(4, "");
  product();
  CHECK(other.end_step(4, ""));
  CHECK_FALSE(flops.end_step(4, ""));
  product();
  CHECK(flops.end_step(4, ""));
  CHECK(flops.per_sample() == 12);
}

TEST_CASE("a count that begins in a pause waits for its end") {
  SampleFlops flops(1);
  flops.set_paused(true);
  flops.end_step(4, "");
  product();
  flops.set_paused(false);
  product();
  CHECK(flops.end_step(4, ""));
  CHECK(flops.per_sample() == 12);
}

TEST_CASE("a recurrent layer alone has the peak of its dtype, for FLOPs that the program gives") {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4));
  SampleFlops flops(0);
  flops.set(100);
  flops.end_step(1, "NVIDIA H200");
  const torch::NoGradGuard no_grad;
  lstm->forward(torch::ones({2, 1, 4}));
  CHECK(flops.end_step(1, "NVIDIA H200"));
  CHECK(flops.peak_tflops() == 66.9);
}

TEST_CASE("impossible numbers of the program are refused") {
  for (const double bad : {-1.0, kInf, -kInf, std::numeric_limits<double>::quiet_NaN()}) {
    INFO(bad);
    CHECK_THROWS_AS(SampleFlops(bad), ddp::SettingsError);
    CHECK_THROWS_AS(SampleFlops(0).set(bad), ddp::SettingsError);
  }
  CHECK_THROWS_AS(SampleFlops(0).set(0), ddp::SettingsError);
}
