// SPDX-License-Identifier: Apache-2.0
// Backward passes: the sums over a gradient behind the activation, and the gradient of the input.
#include "ops/vision/batch_norm_device.cuh"

namespace ddp::ops::detail {
namespace {

// SiLU needs more registers than two blocks per multiprocessor have. Twice the rows keep as many
// loads in flight.
constexpr int kSiluRows = 2 * kMoreInputs;

constexpr int blocks_per_sm(bool has_more_inputs, Activation activation) {
  return has_more_inputs || activation == Activation::Silu ? 1 : kBlocksPerSm;
}

// SiLU's backward computes the result of the normalisation again.
template <Activation kActivation>
__device__ ScaleShift norm_of(const BackwardTarget& target, const float* silu_bias, int vector) {
  if constexpr (kActivation == Activation::Silu) {
    return {{target.mean, target.invstd, target.weight, silu_bias, 0.0F, false}, vector};
  }
  return {};
}

// d *= activation'(bn(x)); `passed` stands for ReLU's.
template <typename T, Activation kActivation>
__device__ void multiply_by_slope(unsigned passed, const Vector& x, const ScaleShift& bn,
                                  float (&d)[8]) {
  if constexpr (kActivation == Activation::Relu) {
    keep_passed(passed, d);
  } else if constexpr (kActivation == Activation::Silu) {
    float values[8];
    unpack<T>(x, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float z = values[i] * bn.scale[i] + bn.shift[i];
      const float s = fast_sigmoid(z);
      d[i] *= s * (1 + z * (1 - s));
    }
  }
}

// Sums of the gradient and of its products with the inputs over the whole grid, in the last block.
template <bool kTwoNorms, int kSums>
__device__ __forceinline__ void finish_sums(const BackwardReduceCall& call,
                                            const float (&sums)[kSums][8]) {
  const BatchNormGrid& grid = call.grid;
  double totals[kSums];
  if (!grid_sums<kSums>(sums, grid, call.scratch, totals) ||
      static_cast<int>(threadIdx.x) >= 8 * grid.slice) {
    return;
  }
  const int channel = static_cast<int>(blockIdx.y) * 8 * grid.slice + threadIdx.x;
  finish_backward(call.first, channel, 8 * grid.vectors, grid.rows, totals[0], totals[1]);
  if constexpr (kTwoNorms) {
    finish_backward(call.second, channel, 8 * grid.vectors, grid.rows, totals[0], totals[2]);
  }
}

template <typename T, bool kTwoGrads, bool kTwoNorms, Activation kActivation = Activation::Relu>
__global__ void __launch_bounds__(kThreads,
                                  kTwoGrads || kTwoNorms || kActivation == Activation::Silu
                                      ? 1
                                      : kBlocksPerSm) reduce_kernel(BackwardReduceCall call) {
  constexpr int kRows = kActivation == Activation::Silu ? kSiluRows : kMoreInputs;
  constexpr int kSums = kTwoNorms ? 3 : 2;
  const BatchNormGrid& grid = call.grid;
  const Lane lane(grid);
  const auto* grad = static_cast<const Vector*>(call.grad);
  const auto* grad2 = static_cast<const Vector*>(call.grad2);
  const auto* x = static_cast<const Vector*>(call.first.x);
  const auto* x2 = static_cast<const Vector*>(call.second.x);
  auto* sum = static_cast<Vector*>(call.sum);
  float mean[8], mean2[8];
  load8(call.first.mean, lane.vector, mean);
  if constexpr (kTwoNorms) {
    load8(call.second.mean, lane.vector, mean2);
  }
  const auto bn = norm_of<kActivation>(call.first, call.silu_bias, lane.vector);
  float sums[kSums][8] = {};
  for_each_row<kRows, From::End>(grid, lane, [&](int at, int distance, int count) {
    Vector grads[kRows], grads2[kRows], inputs[kRows], inputs2[kRows];
    unsigned passed[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j < count) {
        const int here = at + j * distance;
        grads[j] = grad[here];
        inputs[j] = x[here];
        passed[j] = kActivation == Activation::Relu ? call.mask[here] : 0;
        if constexpr (kTwoGrads) {
          grads2[j] = grad2[here];
        }
        if constexpr (kTwoNorms) {
          inputs2[j] = x2[here];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j < count) {
        float d[8];
        unpack<T>(grads[j], d);
        if constexpr (kTwoGrads) {
          add_to<T>(d, grads2[j]);
        }
        multiply_by_slope<T, kActivation>(passed[j], inputs[j], bn, d);
        if (sum != nullptr) {
          const Vector rounded = pack<T>(d);
          sum[at + j * distance] = rounded;
          unpack<T>(rounded, d);  // as launch_backward_apply reads it
        }
        add_products<T>(d, inputs[j], mean, sums[1]);
        if constexpr (kTwoNorms) {
          add_products<T>(d, inputs2[j], mean2, sums[2]);
        }
        add_values(d, sums[0]);
      }
    }
  });
  allow_next_launch();
  finish_sums<kTwoNorms>(call, sums);
}

template <typename T, Activation kActivation, bool kTwoNorms>
__global__ void __launch_bounds__(kThreads,
                                  kTwoNorms || kActivation == Activation::Silu ? 1 : kBlocksPerSm)
    grad_kernel(BackwardApplyCall call) {
  constexpr int kRows = kActivation == Activation::Silu ? kSiluRows : kMoreInputs;
  const BatchNormGrid& grid = call.grid;
  const Lane lane(grid);
  const auto* grad = static_cast<const Vector*>(call.grad);
  const auto* x = static_cast<const Vector*>(call.first.x);
  const auto* x2 = static_cast<const Vector*>(call.second.x);
  wait_for_previous_launch();
  const Coefficients first(call.first.coefficients, grid.vectors, lane.vector);
  Coefficients second;
  if constexpr (kTwoNorms) {
    second = Coefficients(call.second.coefficients, grid.vectors, lane.vector);
  }
  const auto bn = norm_of<kActivation>(call.first, call.silu_bias, lane.vector);
  for_each_row<kRows, From::Start>(grid, lane, [&](int at, int distance, int count) {
    Vector grads[kRows], inputs[kRows], inputs2[kRows];
    unsigned passed[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j < count) {
        const int here = at + j * distance;
        grads[j] = grad[here];
        inputs[j] = x[here];
        passed[j] = kActivation == Activation::Relu ? call.mask[here] : 0;
        if constexpr (kTwoNorms) {
          inputs2[j] = x2[here];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j < count) {
        const int here = at + j * distance;
        float d[8];
        unpack<T>(grads[j], d);
        multiply_by_slope<T, kActivation>(passed[j], inputs[j], bn, d);
        write_grad<T>(first, d, inputs[j], static_cast<Vector*>(call.first.grad_x) + here);
        if constexpr (kTwoNorms) {
          write_grad<T>(second, d, inputs2[j], static_cast<Vector*>(call.second.grad_x) + here);
        }
      }
    }
  });
}

template <typename T, bool kTwoGrads>
void reduce(const BackwardReduceCall& call, dim3 blocks, cudaStream_t stream) {
  if (call.second_used) {
    reduce_kernel<T, kTwoGrads, true><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    reduce_kernel<T, kTwoGrads, false><<<blocks, kThreads, 0, stream>>>(call);
  }
}

template <typename T>
void reduce_as(const BackwardReduceCall& call, dim3 blocks, cudaStream_t stream) {
  if (call.silu_bias != nullptr) {
    reduce_kernel<T, false, false, Activation::Silu><<<blocks, kThreads, 0, stream>>>(call);
  } else if (call.mask == nullptr) {
    reduce_kernel<T, false, false, Activation::None><<<blocks, kThreads, 0, stream>>>(call);
  } else if (call.grad2 != nullptr) {
    reduce<T, true>(call, blocks, stream);
  } else {
    reduce<T, false>(call, blocks, stream);
  }
}

template <typename T>
cudaError_t apply(const BackwardApplyCall& call, dim3 blocks, cudaStream_t stream) {
  const bool two = call.second_used;
  auto* kernel =
      two ? grad_kernel<T, Activation::None, true> : grad_kernel<T, Activation::None, false>;
  if (call.silu_bias != nullptr) {
    kernel = grad_kernel<T, Activation::Silu, false>;
  } else if (call.mask != nullptr) {
    kernel = two ? grad_kernel<T, Activation::Relu, true> : grad_kernel<T, Activation::Relu, false>;
  }
  return launch_after(kernel, call, blocks, call.follows_sums, stream);
}

}  // namespace

cudaError_t launch_backward_reduce(const BackwardReduceCall& call, Half dtype,
                                   cudaStream_t stream) {
  const bool has_more = call.grad2 != nullptr || call.second_used || call.silu_bias != nullptr;
  const dim3 blocks = has_more ? half_grid(call.grid) : dim3(call.grid.blocks, call.grid.slices);
  if (dtype == Half::Bfloat16) {
    reduce_as<__nv_bfloat16>(call, blocks, stream);
  } else {
    reduce_as<__half>(call, blocks, stream);
  }
  return cudaGetLastError();
}

cudaError_t launch_backward_apply(const BackwardApplyCall& call, Half dtype, cudaStream_t stream) {
  const dim3 blocks(call.grid.blocks, call.grid.slices);
  return dtype == Half::Bfloat16 ? apply<__nv_bfloat16>(call, blocks, stream)
                                 : apply<__half>(call, blocks, stream);
}

}  // namespace ddp::ops::detail
