// SPDX-License-Identifier: Apache-2.0
// Times of the batch norm kernels on ResNet-50's and EfficientNet-B0's activations (batch 256,
// bfloat16):
//   gpu_batch_norm "[bench]"
// Each time is the median of 21 replays of a CUDA graph whose calls rotate over buffers. Also
// prints the bytes read and written as a share of 4.3 TB/s.
#include <ATen/cuda/CUDAContext.h>
#include <cuda_runtime_api.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>

#include "ops/vision/batch_norm_kernels.hpp"
#include "support/catch.hpp"

using namespace ddp::ops::detail;

namespace {

constexpr int kBuffers = 4;

/// Median time of one call in µs.
double time_us(const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaStreamCreate(&stream);
  constexpr int kCalls = 2 * kBuffers;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  for (int i = 0; i < kCalls; ++i) {
    call(i % kBuffers, stream);
  }
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&executable, graph, 0);
  cudaEvent_t begin = nullptr, end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 24; ++i) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(executable, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) {
      times.push_back(ms * 1000 / kCalls);
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Device memory for all kernels of one shape.
struct Bench {
  int64_t batch, height, channels, elements;
  BatchNormGrid grid, map;
  int num_sms;
  std::vector<torch::Tensor> x, z, grad, grad2, y, out, mask;
  torch::Tensor vectors, partials, kernel_counters;

  Bench(int64_t batch_in, int64_t height_in, int64_t channels_in)
      : batch(batch_in), height(height_in), channels(channels_in) {
    const int64_t rows = batch * height * height;
    elements = rows * channels;
    num_sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    grid = sums_grid(rows, channels, num_sms);
    map = map_grid(rows, channels, num_sms);
    const auto half = torch::TensorOptions().device(torch::kCUDA).dtype(torch::kBFloat16);
    for (int i = 0; i < kBuffers; ++i) {
      for (auto* list : {&x, &z, &grad, &grad2, &y, &out}) {
        list->push_back(torch::randn({elements}, half));
      }
      mask.push_back(torch::randint(255, {elements / 8}, half.dtype(torch::kByte)));
    }
    vectors = torch::rand({16, channels}, torch::kCUDA);
    partials = torch::empty({static_cast<int64_t>(num_sms) * channels * 8}, torch::kCUDA);
    kernel_counters =
        torch::zeros({2 * channels}, torch::TensorOptions(torch::kCUDA).dtype(torch::kInt));
  }
  float* vector(int i) const { return vectors.mutable_data_ptr<float>() + i * channels; }
  ReductionScratch scratch() const {
    return {partials.mutable_data_ptr<float>(),
            reinterpret_cast<unsigned*>(kernel_counters.mutable_data_ptr<int>())};
  }
  Affine affine(int i) const {
    return {vector(i), vector(i + 1), vector(i + 2), vector(i + 3), 0.0F, false};
  }
  BackwardTarget target(const torch::Tensor& input, const torch::Tensor& grad_x) const {
    return {input.const_data_ptr(),
            vector(0),
            vector(1),
            vector(2),
            vector(8),
            vector(9),
            false,
            false,
            vector(10),
            grad_x.mutable_data_ptr()};
  }
  void report(const char* what, double bytes_per_element,
              const std::function<void(int, cudaStream_t)>& call) const {
    const double us = time_us(call);
    std::printf("bn-bench %4ldx%-3ldx%-4ld %-28s %7.1f us  %.2f of 4.3 TB/s\n", long(batch),
                long(height), long(channels), what, us,
                bytes_per_element * static_cast<double>(elements) / us * 1e-6 / 4.3);
  }
};

void time_forward(const Bench& b) {
  b.report("statistics", 2, [&](int i, cudaStream_t stream) {
    launch_statistics({b.grid, b.scratch(), b.x[i].const_data_ptr(), b.vector(0), b.vector(1),
                       b.vector(4), b.vector(5), 0.1F, 1e-5F},
                      Half::Bfloat16, stream);
  });
  const auto apply = [&](const char* what, double bytes, bool addend, bool second) {
    b.report(what, bytes, [&, addend, second](int i, cudaStream_t stream) {
      ApplyCall call;
      call.grid = b.map;
      call.x = b.x[i].const_data_ptr();
      call.bn = b.affine(0);
      call.addend = addend ? b.z[i].const_data_ptr() : nullptr;
      call.second = second;
      call.bn2 = b.affine(4);
      call.y = b.y[i].mutable_data_ptr();
      call.mask = b.mask[i].mutable_data_ptr<uint8_t>();
      launch_apply(call, Half::Bfloat16, stream);
    });
  };
  apply("apply", 4.125, false, false);
  apply("apply + residual", 6.125, true, false);
  apply("apply two norms", 6.125, true, true);
}

void time_backward(const Bench& b) {
  const auto reduce = [&](const char* what, double bytes, bool two_grads, bool sum, bool second) {
    b.report(what, bytes, [&, two_grads, sum, second](int i, cudaStream_t stream) {
      BackwardReduceCall call;
      call.grid = b.grid;
      call.scratch = b.scratch();
      call.grad = b.grad[i].const_data_ptr();
      call.grad2 = two_grads ? b.grad2[i].const_data_ptr() : nullptr;
      call.mask = b.mask[i].const_data_ptr<uint8_t>();
      call.sum = sum ? b.y[i].mutable_data_ptr() : nullptr;
      call.first = b.target(b.x[i], b.out[i]);
      call.second_used = second;
      call.second = b.target(b.z[i], b.out[i]);
      launch_backward_reduce(call, Half::Bfloat16, stream);
    });
  };
  reduce("backward sums", 4.125, false, false, false);
  reduce("backward sums of two", 8.125, true, true, false);
  reduce("backward sums of two, 2 norms", 10.125, true, true, true);
  const auto apply = [&](const char* what, double bytes, bool masked, bool second) {
    b.report(what, bytes, [&, masked, second](int i, cudaStream_t stream) {
      BackwardApplyCall call;
      call.grid = b.map;
      call.grad = b.grad[i].const_data_ptr();
      call.mask = masked ? b.mask[i].const_data_ptr<uint8_t>() : nullptr;
      call.first = b.target(b.x[i], b.out[i]);
      call.second_used = second;
      call.second = b.target(b.z[i], b.y[i]);
      launch_backward_apply(call, Half::Bfloat16, stream);
    });
  };
  apply("backward apply, masked", 6.125, true, false);
  apply("backward apply", 6, false, false);
  apply("backward apply, 2 norms", 10, false, true);
}

void time_without_relu(const Bench& b) {
  for (const auto activation : {Activation::None, Activation::Silu}) {
    const bool silu = activation == Activation::Silu;
    const float* bias = silu ? b.vector(3) : nullptr;
    b.report(silu ? "apply, silu" : "apply, no relu", 4, [&](int i, cudaStream_t stream) {
      ApplyCall call;
      call.grid = b.map;
      call.x = b.x[i].const_data_ptr();
      call.bn = b.affine(0);
      call.y = b.y[i].mutable_data_ptr();
      call.activation = activation;
      launch_apply(call, Half::Bfloat16, stream);
    });
    b.report(silu ? "backward sums, silu" : "backward sums, no relu", 4,
             [&](int i, cudaStream_t stream) {
               BackwardReduceCall call;
               call.grid = b.grid;
               call.scratch = b.scratch();
               call.grad = b.grad[i].const_data_ptr();
               call.first = b.target(b.x[i], b.out[i]);
               call.silu_bias = bias;
               launch_backward_reduce(call, Half::Bfloat16, stream);
             });
    b.report(silu ? "backward apply, silu" : "backward apply, no relu", 6,
             [&](int i, cudaStream_t stream) {
               BackwardApplyCall call;
               call.grid = b.map;
               call.grad = b.grad[i].const_data_ptr();
               call.first = b.target(b.x[i], b.out[i]);
               call.silu_bias = bias;
               launch_backward_apply(call, Half::Bfloat16, stream);
             });
  }
}

void time_pool(const Bench& b) {
  const int height = static_cast<int>(b.height), pooled = (height + 1) / 2;
  const PoolShape shape{static_cast<int>(b.batch), height, height, pooled, pooled};
  const auto grid = sums_grid(b.batch * pooled * pooled, b.channels, b.num_sms);
  b.report("pool forward", 2.75, [&](int i, cudaStream_t stream) {
    launch_pool_forward(
        {grid, shape, b.x[i].const_data_ptr(), b.affine(0), b.y[i].mutable_data_ptr(),
         static_cast<uint8_t*>(b.z[i].mutable_data_ptr())},
        Half::Bfloat16, stream);
  });
  for (const bool apply : {false, true}) {
    b.report(apply ? "pool backward apply" : "pool backward sums", apply ? 5.25 : 3.25,
             [&](int i, cudaStream_t stream) {
               PoolBackwardCall call;
               call.grid = grid;
               call.scratch = b.scratch();
               call.shape = shape;
               call.grad = b.grad[i].const_data_ptr();
               call.grad2 = b.grad2[i].const_data_ptr();
               call.index = reinterpret_cast<const uint8_t*>(b.z[i].const_data_ptr());
               call.target = b.target(b.x[i], b.out[i]);
               call.apply = apply;
               launch_pool_backward(call, Half::Bfloat16, stream);
             });
  }
}

// Times one kernel per direction, and the two kernels that it replaces.
void time_small(const Bench& b) {
  for (const int inputs : {1, 2, 3}) {
    SmallForwardCall call;
    call.small =
        small_batch_norm_grid(b.grid.rows, b.channels, b.num_sms, std::min(inputs, 2), true);
    if (call.small.rows_of_thread == 0) {
      continue;
    }
    const char* names[] = {"small apply", "small apply + residual", "small apply two norms"};
    b.report(names[inputs - 1], inputs == 1 ? 4.125 : 6.125, [&](int i, cudaStream_t stream) {
      call.first = {b.grid,      b.scratch(), b.x[i].const_data_ptr(),
                    b.vector(0), b.vector(1), b.vector(4),
                    b.vector(5), 0.1F,        1e-5F};
      call.second = call.first;
      call.second.x = b.z[i].const_data_ptr();
      call.apply.x = call.first.x;
      call.apply.bn = b.affine(0);
      call.apply.bn2 = b.affine(0);
      call.apply.addend = inputs > 1 ? call.second.x : nullptr;
      call.apply.second = inputs == 3;
      call.apply.y = b.y[i].mutable_data_ptr();
      call.apply.mask = b.mask[i].mutable_data_ptr<uint8_t>();
      launch_small_forward(call, Half::Bfloat16, stream);
    });
  }
  for (const int inputs : {2, 3, 4}) {
    SmallBackwardCall call;
    call.small =
        small_batch_norm_grid(b.grid.rows, b.channels, b.num_sms, inputs == 4 ? 3 : 2, true);
    if (call.small.rows_of_thread == 0) {
      continue;
    }
    const char* names[] = {"small backward", "small backward of two", "small backward 2, 2 norms"};
    const double bytes[] = {6.125, 10.125, 10.125};
    b.report(names[inputs - 2], bytes[inputs - 2], [&](int i, cudaStream_t stream) {
      call.reduce.scratch = b.scratch();
      call.reduce.grad = b.grad[i].const_data_ptr();
      call.reduce.grad2 = inputs > 2 ? b.grad2[i].const_data_ptr() : nullptr;
      call.reduce.mask = b.mask[i].const_data_ptr<uint8_t>();
      call.reduce.sum = inputs == 3 ? b.y[i].mutable_data_ptr() : nullptr;
      call.reduce.first = b.target(b.x[i], b.out[i]);
      call.reduce.second_used = inputs == 4;
      call.reduce.second = b.target(b.z[i], b.y[i]);
      launch_small_backward(call, Half::Bfloat16, stream);
    });
  }
}

}  // namespace

TEST_CASE("batch norm kernels of small activations: time", "[.][bench]") {
  // ResNet-18 at 32 pixels, torchvision's stem: batches of 512 and 64.
  for (const int64_t batch : {512, 64}) {
    const std::vector<std::pair<int64_t, int64_t>> shapes = {{8, 64}, {4, 128}, {2, 256}, {1, 512}};
    for (const auto& [height, channels] : shapes) {
      const Bench bench(batch, height, channels);
      time_forward(bench);
      time_backward(bench);
      time_small(bench);
    }
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE("batch norm kernels without ReLU: time", "[.][bench]") {
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {112, 32}, {112, 96}, {56, 144}, {56, 24}, {28, 240}, {14, 480}, {14, 672}, {7, 1152}};
  for (const auto& [height, channels] : shapes) {  // of EfficientNet-B0
    const Bench bench(256, height, channels);
    time_forward(bench);
    time_without_relu(bench);
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE("batch norm kernels: time", "[.][bench]") {
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {56, 64}, {56, 256}, {28, 128}, {28, 512}, {14, 256}, {14, 1024}, {7, 512}, {7, 2048}};
  {
    const Bench stem(256, 112, 64);
    time_forward(stem);
    time_pool(stem);
  }
  for (const auto& [height, channels] : shapes) {
    const Bench bench(256, height, channels);
    time_forward(bench);
    time_backward(bench);
    time_small(bench);
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}
