// SPDX-License-Identifier: Apache-2.0
// The kernels of ddp/ops/vision.hpp compared with the ops of ATen that define them, in float64.
#include "gpu/vision/batch_norm_test.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <cmath>
#include <limits>

#include "ddp/detail/fusable_norm.hpp"
#include "gpu/language/lm_test.hpp"
#include "ops/vision/batch_norm_call.hpp"
#include "support/catch.hpp"

using namespace batch_norm_test;
using lm_test::relative_error;

namespace {

// One rounding of a result is 2^-9 of it in bfloat16 and 2^-12 in float16. A gradient is rounded
// when two are summed, and again as grad_x; its sums use the rounded values. In the 2-norm that is
// below one unit in the last place. Statistics are float32.
double tolerance(torch::Dtype dtype) {
  return dtype == torch::kHalf ? 0x1p-10 : 0x1p-7;
}

// A value within float32's rounding of zero may pass the ReLU on one side only: about one in a
// million does. Each changes a gradient's 2-norm by about 1 / sqrt(elements).
double tolerance_of_passing(const torch::Tensor& x) {
  const auto elements = static_cast<double>(x.numel());
  return 2 * std::sqrt(std::floor(elements / 1e6) / elements);
}

void check_against_twin(torch::IntArrayRef shape, torch::Dtype dtype, Form form) {
  auto inputs = make_inputs(shape, torch::kCUDA, dtype);
  auto reference = converted(inputs, torch::kDouble);
  const auto results = run(inputs, form);
  const auto expected = run(reference, form);
  REQUIRE(results.size() == expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    INFO(results[i].first);
    const bool is_float = results[i].second.scalar_type() == torch::kFloat;
    const bool is_sum = results[i].first.find("running") == std::string::npos;
    const double limit =
        is_float && !is_sum ? 1e-5 : tolerance(dtype) + tolerance_of_passing(inputs.x);
    CHECK(results[i].second.sizes() == expected[i].second.sizes());
    CHECK(relative_error(results[i].second, expected[i].second) <= limit);
  }
}

}  // namespace

TEST_CASE("batch norm kernels give what ATen gives, in all forms") {
  const std::vector<std::vector<int64_t>> shapes = {
      {4, 64, 14, 14}, {2, 256, 9, 7},  {3, 24, 5, 5},     {1, 8, 3, 3},   {64, 512, 1, 1},
      {2, 2048, 2, 2}, {8, 96, 17, 33}, {33, 128, 28, 28}, {5, 144, 9, 13}};
  torch::manual_seed(1);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& shape : shapes) {
      for (const auto& [name, form] : forms()) {
        INFO(name << " " << torch::IntArrayRef(shape) << " " << dtype);
        check_against_twin(shape, dtype, form);
      }
    }
  }
}

TEST_CASE("batch norm kernels repeat their bits, alone and in a CUDA graph") {
  torch::manual_seed(2);
  for (const auto& [name, form] : forms()) {
    INFO(name);
    auto inputs = make_inputs({16, 256, 14, 14}, torch::kCUDA, torch::kBFloat16);
    inputs.bn.kernel_counters = ddp::ops::batch_norm_kernel_counters(inputs.bn.weight);
    auto again = converted(inputs, torch::kFloat);
    again.x = inputs.x.detach().clone(), again.z = inputs.z.detach().clone();
    again.grad = inputs.grad, again.grad2 = inputs.grad2;
    auto captured = again;
    captured.bn = converted(again.bn, torch::kFloat);
    captured.bn_z = converted(again.bn_z, torch::kFloat);
    captured.x = again.x.clone(), captured.z = again.z.clone();
    captured.bn.kernel_counters = ddp::ops::batch_norm_kernel_counters(inputs.bn.weight);

    const auto first = run(inputs, form);
    const auto second = run(again, form);
    at::cuda::CUDAGraph graph;
    Named third;
    const auto stream = at::cuda::getStreamFromPool();
    c10::cuda::device_synchronize();
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      graph.capture_begin();
      third = run(captured, form);
      graph.capture_end();
      graph.replay();
      stream.synchronize();
    }
    for (size_t i = 0; i < first.size(); ++i) {
      INFO(first[i].first);
      CHECK(torch::equal(first[i].second, second[i].second));
      CHECK(torch::equal(first[i].second, third[i].second));
    }
  }
}

TEST_CASE("only kernels whose blocks wait leave multiprocessors free") {
  torch::manual_seed(6);
  const int sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const auto run_with = [](Inputs inputs, Form form, int reserved) {
    inputs.bn = converted(inputs.bn, torch::kFloat);
    inputs.bn_z = converted(inputs.bn_z, torch::kFloat);
    inputs.x = inputs.x.detach().clone(), inputs.z = inputs.z.detach().clone();
    const ddp::ops::MultiprocessorReservation reservation(reserved);
    return run(inputs, form);
  };
  for (const auto& [name, form] : forms()) {
    INFO(name);
    // Too large for one kernel with any number of free multiprocessors: the same blocks, so the
    // same bits.
    const auto large = make_inputs({64, 64, 56, 56}, torch::kCUDA, torch::kBFloat16);
    const auto alone = run_with(large, form, 0);
    const auto beside = run_with(large, form, 24);
    for (size_t i = 0; i < alone.size(); ++i) {
      INFO(alone[i].first);
      CHECK(torch::equal(alone[i].second, beside[i].second));
    }
  }
  const auto small = make_inputs({32, 128, 16, 16}, torch::kCUDA, torch::kBFloat16);
  const ddp::ops::detail::KernelScope kernels(small.x);
  CHECK(kernels.num_sms() == sms);
  const auto blocks = [&] {
    const auto grid = kernels.small_grid(small.x, 2);
    return grid.rows_of_thread == 0 ? 0 : grid.grid.blocks * grid.grid.slices;
  };
  CHECK(blocks() > sms - 24);
  const ddp::ops::MultiprocessorReservation reservation(sms - 64);
  CHECK(blocks() > 0);
  CHECK(blocks() <= 64);
}

TEST_CASE("a variance keeps its digits far from zero") {
  // Channels at 30 +- 0.1, where plain float32 sums of squares would keep two digits.
  torch::manual_seed(3);
  auto inputs = make_inputs({64, 64, 28, 28}, torch::kCUDA, torch::kHalf);
  inputs.x = (torch::randn({64, 64, 28, 28}, torch::kCUDA) * 0.1 + 30)
                 .to(torch::kHalf)
                 .contiguous(at::MemoryFormat::ChannelsLast);
  inputs.bn.momentum = 1;
  auto reference = converted(inputs, torch::kDouble);
  run(inputs, Form::Relu);
  run(reference, Form::Relu);
  CHECK(relative_error(inputs.bn.running_var, reference.bn.running_var) <= 1e-5);
}

TEST_CASE("batch norm kernels pass a NaN on, and evaluate by the running estimates") {
  torch::manual_seed(4);
  for (const auto& [name, form] : forms()) {
    INFO(name);
    auto inputs = make_inputs({4, 64, 8, 8}, torch::kCUDA, torch::kBFloat16);
    inputs.x[1][3][2][2] = std::numeric_limits<float>::quiet_NaN();
    const auto results = run(inputs, form);
    for (const char* what : {"y", "gradient of x", "gradient of weight", "running_var"}) {
      INFO(what);
      for (const auto& item : results) {
        if (item.first == what) {
          CHECK(torch::isnan(item.second).any().item<bool>());
        }
      }
    }
    const torch::NoGradGuard no_grad;
    auto evaluated = make_inputs({4, 64, 9, 8}, torch::kCUDA, torch::kBFloat16);
    evaluated.bn.training = evaluated.bn_z.training = false;
    const auto before = evaluated.bn.running_mean.clone();
    auto reference = converted(evaluated, torch::kDouble);
    const auto y = call(evaluated, form).branch;
    CHECK(relative_error(y, call(reference, form).branch) <= tolerance(torch::kBFloat16));
    CHECK(torch::equal(before, evaluated.bn.running_mean));
  }
}

namespace {

torch::Tensor grad_of_x(const Inputs& in, Form form, const torch::Tensor& grad) {
  return torch::autograd::grad({call(in, form).branch}, {in.x}, {grad})[0];
}

}  // namespace

TEST_CASE("batch norm kernels without a ReLU take gradients of any strides") {
  torch::manual_seed(7);
  const std::vector<int64_t> shape = {4, 64, 6, 5};
  for (const auto form : {Form::Plain, Form::Silu}) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      auto inputs = make_inputs(shape, torch::kCUDA, dtype);
      auto reference = converted(inputs, torch::kDouble);
      inputs.x.requires_grad_(true), reference.x.requires_grad_(true);
      const auto options = inputs.x.options().requires_grad(false);
      for (const auto& grad :
           {torch::randn({4, 1, 6, 1}, options).expand(shape), torch::randn(shape, options),
            torch::randn({4, 128, 6, 10}, options).slice(1, 0, 128, 2).narrow(3, 1, 5)}) {
        CAPTURE(static_cast<int>(form), dtype, grad.strides());
        CHECK(relative_error(grad_of_x(inputs, form, grad),
                             grad_of_x(reference, form, grad.to(torch::kDouble))) <=
              tolerance(dtype));
      }
    }
  }
}

TEST_CASE("batch norm kernels without a ReLU leave frozen parameters alone") {
  torch::manual_seed(8);
  for (const auto form : {Form::Plain, Form::Silu}) {
    for (const int frozen : {1, 2, 3}) {  // weight, bias, both
      CAPTURE(static_cast<int>(form), frozen);
      auto inputs = make_inputs({4, 64, 6, 5}, torch::kCUDA, torch::kBFloat16);
      auto reference = converted(inputs, torch::kDouble);
      for (auto* in : {&inputs, &reference}) {
        in->x.requires_grad_(true);
        in->bn.weight.requires_grad_((frozen & 1) == 0);
        in->bn.bias.requires_grad_((frozen & 2) == 0);
        call(*in, form).branch.backward(in->grad);
      }
      CHECK(relative_error(inputs.x.grad(), reference.x.grad()) <= tolerance(torch::kBFloat16));
      for (const auto& [got, wanted] : {std::pair{inputs.bn.weight, reference.bn.weight},
                                        {inputs.bn.bias, reference.bn.bias}}) {
        CHECK(got.grad().defined() == wanted.grad().defined());
        CHECK((!got.grad().defined() ||
               relative_error(got.grad(), wanted.grad()) <= tolerance(torch::kBFloat16)));
      }
    }
  }
}

TEST_CASE("batch norm with SiLU is finite and right far from zero") {
  torch::manual_seed(9);
  for (const double centre : {-300.0, -80.0, -10.0, 10.0, 80.0, 300.0}) {
    CAPTURE(centre);
    auto inputs = make_inputs({4, 64, 6, 5}, torch::kCUDA, torch::kBFloat16);
    inputs.bn.bias.fill_(centre);
    auto reference = converted(inputs, torch::kDouble);
    const auto results = run(inputs, Form::Silu), expected = run(reference, Form::Silu);
    for (size_t i = 0; i < results.size(); ++i) {
      INFO(results[i].first);
      CHECK(results[i].second.isfinite().all().item<bool>());
      // Most results are near zero at one end: differences are compared with the largest.
      const double scale = std::max(expected[i].second.abs().max().item<double>(), 1.0);
      CHECK(
          (results[i].second.to(torch::kDouble) - expected[i].second).abs().max().item<double>() <=
          2 * tolerance(torch::kBFloat16) * scale);
    }
  }
}
