// SPDX-License-Identifier: Apache-2.0
#include "ops/language/gelu_kernels.hpp"

#include <type_traits>

#include "ops/kernel_types.cuh"
#include "ops/language/column_sums.cuh"

namespace ddp::ops::detail {
namespace {

// The approximation is x (1 + tanh(u)) / 2 with u = kBeta (x + kCubic x³), kBeta = sqrt(2 / pi).
constexpr float kBeta = 0.7978845608028654F;
constexpr float kCubic = 0.044715F;
constexpr float kInverseSqrt2 = 0.7071067811865476F;
constexpr float kInverseSqrt2Pi = 0.3989422804014327F;

/// The share of x that passes, from 0 to 1.
template <bool kTanh>
__device__ float gate_of(float x) {
  if constexpr (kTanh) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u)
    return 1.0F / (1.0F + __expf(-2.0F * kBeta * (x + kCubic * x * x * x)));
  } else {
    return 0.5F * (1.0F + erff(x * kInverseSqrt2));
  }
}

template <bool kTanh>
__device__ float derivative(float x) {
  const float gate = gate_of<kTanh>(x);
  if constexpr (kTanh) {
    return gate + 2.0F * x * gate * (1.0F - gate) * kBeta * (1.0F + 3.0F * kCubic * x * x);
  } else {
    return gate + x * kInverseSqrt2Pi * __expf(-0.5F * x * x);
  }
}

template <typename T, typename B, bool kTanh>
__global__ void gelu(GeluRows shape, int64_t part_rows, const T* x, const B* bias, T* out) {
  const int64_t column = column_of_thread();
  if (column >= shape.columns) {
    return;
  }
  float shift[kColumnVector] = {};
  if (bias != nullptr) {
    load8(bias + column, 1, shift);
  }
  const int64_t first = blockIdx.y * part_rows;
  const int64_t end = min(first + part_rows, shape.rows);
#pragma unroll 4
  for (int64_t row = first + threadIdx.y; row < end; row += kColumnRows) {
    float values[kColumnVector];
    load8(x + row * shape.columns + column, 1, values);
#pragma unroll
    for (int j = 0; j < kColumnVector; ++j) {
      values[j] += shift[j];
      values[j] *= gate_of<kTanh>(values[j]);
    }
    store8(out + row * shape.columns + column, 1, values);
  }
}

template <typename T, typename B, bool kTanh>
__global__ void gelu_backward(GeluRows shape, int64_t part_rows, const T* grad, const T* x,
                              const B* bias, T* grad_x, float* parts) {
  const int64_t column = column_of_thread();
  const int64_t first = blockIdx.y * part_rows;
  const int64_t end = min(first + part_rows, shape.rows);
  float own[kColumnVector] = {};
  if (column < shape.columns) {
    float shift[kColumnVector] = {};
    if (bias != nullptr) {
      load8(bias + column, 1, shift);
    }
#pragma unroll 2
    for (int64_t row = first + threadIdx.y; row < end; row += kColumnRows) {
      const int64_t i = row * shape.columns + column;
      float gradient[kColumnVector], values[kColumnVector];
      load8(grad + i, 1, gradient);
      load8(x + i, 1, values);
#pragma unroll
      for (int j = 0; j < kColumnVector; ++j) {
        gradient[j] *= derivative<kTanh>(values[j] + shift[j]);
        own[j] += gradient[j];
      }
      store8(grad_x + i, 1, gradient);
    }
  }
  if (parts != nullptr) {
    write_column_part(own, shape.columns, parts);
  }
}

/// Calls `call` with the tags of both types and of the approximation.
template <typename Call>
cudaError_t with_kernel(const GeluRows& shape, Call&& call) {
  return with_compute_type(shape.element, [&](auto tag) {
    const auto with_bias = [&](auto bias) {
      shape.is_tanh ? call(tag, bias, std::true_type{}) : call(tag, bias, std::false_type{});
      return cudaGetLastError();
    };
    return shape.bias == Element::Float32 ? with_bias(TypeTag<float>{}) : with_bias(tag);
  });
}

}  // namespace

cudaError_t launch_gelu(const GeluRows& shape, const void* x, const void* bias, void* out,
                        cudaStream_t stream) {
  return with_kernel(shape, [&](auto tag, auto bias_tag, auto is_tanh) {
    using T = typename decltype(tag)::type;
    using B = typename decltype(bias_tag)::type;
    gelu<T, B, decltype(is_tanh)::value>
        <<<column_grid(shape.rows, shape.columns), dim3(kColumnLanes, kColumnRows), 0, stream>>>(
            shape, rows_of_column_part(shape.rows, shape.columns), static_cast<const T*>(x),
            static_cast<const B*>(bias), static_cast<T*>(out));
  });
}

cudaError_t launch_gelu_backward(const GeluRows& shape, const void* grad, const void* x,
                                 const void* bias, void* grad_x, float* parts,
                                 cudaStream_t stream) {
  return with_kernel(shape, [&](auto tag, auto bias_tag, auto is_tanh) {
    using T = typename decltype(tag)::type;
    using B = typename decltype(bias_tag)::type;
    gelu_backward<T, B, decltype(is_tanh)::value>
        <<<column_grid(shape.rows, shape.columns), dim3(kColumnLanes, kColumnRows), 0, stream>>>(
            shape, rows_of_column_part(shape.rows, shape.columns), static_cast<const T*>(grad),
            static_cast<const T*>(x), static_cast<const B*>(bias), static_cast<T*>(grad_x), parts);
  });
}

}  // namespace ddp::ops::detail
