// SPDX-License-Identifier: Apache-2.0
// Rows stay in registers between their sums and their results. A warp handles a row of up to 1,024
// elements, a block of 256 threads a longer one.
#include "ops/language/layer_norm_kernels.hpp"

#include <algorithm>

#include "ops/kernel_types.cuh"
#include "ops/language/dropout_draws.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kMaxVectors = 4;  // of a thread

/// The first column of a thread's vector `v`.
template <int kGroup>
__device__ int column_of(int v) {
  return (v * kGroup + static_cast<int>(threadIdx.x) % kGroup) * kVector;
}

/// The sums of two values over the `kGroup` threads of a row, for all of them.
template <int kGroup>
__device__ float2 row_sums(float2 own) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    own.x += __shfl_xor_sync(~0U, own.x, offset);
    own.y += __shfl_xor_sync(~0U, own.y, offset);
  }
  if constexpr (kGroup > kWarp) {
    __shared__ float2 of_warps[kThreads / kWarp];
    __syncthreads();  // the last row's sums have been read
    if (threadIdx.x % kWarp == 0) {
      of_warps[threadIdx.x / kWarp] = own;
    }
    __syncthreads();
    own = {0, 0};
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      own.x += of_warps[warp].x;
      own.y += of_warps[warp].y;
    }
  }
  return own;
}

/// Replaces eight elements of the branch by their sum as `T` rounds it, and stores that.
template <typename T, typename W>
__device__ void add_branch(const NormBranch& branch, const DropoutState& dropout, int64_t first,
                           int column, T* sum, float (&values)[kVector]) {
  if (branch.bias != nullptr) {
    float shift[kVector];
    load8(static_cast<const W*>(branch.bias) + column, 1, shift);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      values[j] += shift[j];
    }
  }
  if (dropout.threshold > 0) {
    drop8(dropout, first / kVector, values);
  }
  float before[kVector];
  load8(static_cast<const T*>(branch.residual) + first, 1, before);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    values[j] = to_float(from_float<T>(values[j] + before[j]));
  }
  store8(sum + first, 1, values);
}

/// Loads a row, with the branch added, and returns the sum of this thread's elements.
template <typename T, typename W, bool kAdds, int kGroup, int kVectors>
__device__ __forceinline__ float load_row(int64_t row, int dim, const NormBranch& branch,
                                          const DropoutState& dropout, const T* x, T* sum_out,
                                          float (&values)[kVectors][kVector]) {
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of<kGroup>(v);
    if (column < dim) {
      load8(x + row * dim + column, 1, values[v]);
      if constexpr (kAdds) {
        add_branch<T, W>(branch, dropout, row * dim + column, column, sum_out, values[v]);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sum += values[v][j];
      }
    }
  }
  return sum;
}

template <int kGroup, int kVectors>
__device__ __forceinline__ float squared_distance(int dim, float mean,
                                                  const float (&values)[kVectors][kVector]) {
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of<kGroup>(v) < dim) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float difference = values[v][j] - mean;
        squares += difference * difference;
      }
    }
  }
  return squares;
}

template <typename T, typename W, bool kRms, bool kAdds, int kGroup, int kVectors>
__global__ void forward(int64_t rows, int dim, float eps, NormBranch branch, const T* x,
                        const W* weight, const W* bias, T* sum_out, T* y, float* mean_out,
                        float* rstd_out) {
  const int64_t row =
      int64_t{blockIdx.x} * (kThreads / kGroup) + static_cast<int>(threadIdx.x) / kGroup;
  DropoutState dropout;
  if constexpr (kAdds) {
    dropout = start_draws(branch.draws, blockIdx.x == 0 && threadIdx.x == 0);
  }
  if (row >= rows) {
    return;  // a whole warp: only groups of one warp share a block
  }
  float values[kVectors][kVector];
  const float sum =
      load_row<T, W, kAdds, kGroup, kVectors>(row, dim, branch, dropout, x, sum_out, values);
  const float length = static_cast<float>(dim);
  const float mean = kRms ? 0.0F : row_sums<kGroup>({sum, 0}).x / length;
  const float squares = squared_distance<kGroup, kVectors>(dim, mean, values);
  const float rstd = rsqrtf(row_sums<kGroup>({squares, 0}).x / length + eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of<kGroup>(v);
    if (column < dim) {
      float scale[kVector], shift[kVector] = {};
      load8(weight + column, 1, scale);
      if constexpr (!kRms) {
        load8(bias + column, 1, shift);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        values[v][j] = (values[v][j] - mean) * rstd * scale[j] + shift[j];
      }
      store8(y + row * dim + column, 1, values[v]);
    }
  }
  if (threadIdx.x % kGroup == 0) {
    rstd_out[row] = rstd;
    if constexpr (!kRms) {
      mean_out[row] = mean;
    }
  }
}

/// Writes a block's sums over its rows. With one warp per row, the block's warps are added first.
template <int kGroup, int kVectors>
__device__ void write_part(int dim, const float (&sums)[kVectors][kVector], float* parts) {
  const int member = static_cast<int>(threadIdx.x) % kGroup;
  float* const out = parts + int64_t{blockIdx.x} * dim;
  if constexpr (kGroup == kThreads) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * kGroup + member) * kVector;
      if (column < dim) {
        store8(out + column, 1, sums[v]);
      }
    }
  } else {
    __shared__ float shared[kThreads / kWarp][kWarp * kVector];
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        shared[warp][j * kWarp + member] = sums[v][j];
      }
      __syncthreads();
      // Thread t adds the warps' sums of one column: 256 threads, 256 columns.
      float sum = 0;
      for (int w = 0; w < kThreads / kWarp; ++w) {
        sum += shared[w][threadIdx.x];
      }
      const int column = (v * kGroup + static_cast<int>(threadIdx.x) % kWarp) * kVector +
                         static_cast<int>(threadIdx.x) / kWarp;
      if (column < dim) {
        out[column] = sum;
      }
    }
  }
}

/// What the registers allow a backward.
constexpr int blocks_per_multiprocessor(bool is_rms, int group, int vectors) {
  if (is_rms) {
    return group > kWarp && vectors < kMaxVectors ? 3 : 2;
  }
  return vectors < kMaxVectors ? 2 : 1;
}

/// A thread's elements of one row in the backward.
template <int kVectors>
struct RowGradients {
  float g[kVectors][kVector];  // grad_y * weight
  float n[kVectors][kVector];  // (x - mean) * rstd
};

/// Loads a row, adds to the sums for the weight's and the bias's gradients, and returns the
/// thread's sums of g and of g * n.
template <typename T, typename W, bool kRms, int kGroup, int kVectors>
__device__ __forceinline__ float2 load_gradients(int64_t row, int dim, float mean, float rstd,
                                                 const T* grad_y, const T* x, const W* weight,
                                                 RowGradients<kVectors>& values,
                                                 float (&weight_sums)[kVectors][kVector],
                                                 float (&bias_sums)[kVectors][kVector]) {
  auto& [g, n] = values;
  float2 sums = {0, 0};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of<kGroup>(v);
    if (column < dim) {
      float scale[kVector];
      load8(grad_y + row * dim + column, 1, g[v]);
      load8(x + row * dim + column, 1, n[v]);
      load8(weight + column, 1, scale);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        n[v][j] = (n[v][j] - mean) * rstd;
        weight_sums[v][j] += g[v][j] * n[v][j];
        if constexpr (!kRms) {
          bias_sums[v][j] += g[v][j];
        }
        g[v][j] *= scale[j];
        sums.x += g[v][j];
        sums.y += g[v][j] * n[v][j];
      }
    }
  }
  return sums;
}

/// The branch's gradient in vector `v` is grad_x after the branch's dropout. Its sums over the
/// block's rows are the gradient of the branch's bias.
template <typename T, int kVectors>
__device__ __forceinline__ void store_branch_gradient(
    const DropoutState& dropout, int64_t first, int v, float (&grad)[kVector], T* grad_branch,
    float (&branch_sums)[kVectors][kVector][kThreads]) {
  if (dropout.threshold > 0) {
    drop8(dropout, first / kVector, grad);
    store8(grad_branch + first, 1, grad);
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    branch_sums[v][j][threadIdx.x] += grad[j];
  }
}

template <int kGroup, int kVectors>
__device__ __forceinline__ void write_branch_part(
    int dim, const float (&branch_sums)[kVectors][kVector][kThreads], float* parts) {
  float sums[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[v][j] = branch_sums[v][j][threadIdx.x];
    }
  }
  write_part<kGroup, kVectors>(dim, sums, parts);
}

// With g = grad_y * weight and n = (x - mean) * rstd:
//   grad_x = rstd * (g - mean(g) - n * mean(g * n)) + grad_skip;  RMSNorm: without mean(g)
template <typename T, typename W, bool kRms, bool kAdds, int kGroup, int kVectors>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(kRms, kGroup, kVectors))
    backward(int64_t rows, int dim, DropoutDraws draws, const T* grad_y, const T* grad_skip,
             const T* x, const W* weight, const float* mean_in, const float* rstd_in, T* grad_x,
             T* grad_branch, NormParts parts) {
  const float inverse = 1.0F / static_cast<float>(dim);
  float weight_sums[kVectors][kVector] = {};
  float bias_sums[kVectors][kVector] = {};
  // In registers they would halve the number of blocks per multiprocessor. A thread has a column.
  __shared__ float branch_sums[kAdds ? kVectors : 1][kVector][kThreads];
  DropoutState dropout;
  if constexpr (kAdds) {
    dropout = start_draws(draws, false);
#pragma unroll
    for (int e = 0; e < kVectors * kVector; ++e) {
      branch_sums[e / kVector][e % kVector][threadIdx.x] = 0;
    }
  }
  constexpr int kRowsPerBlock = kThreads / kGroup;
  for (int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + static_cast<int>(threadIdx.x) / kGroup;
       row < rows; row += int64_t{gridDim.x} * kRowsPerBlock) {
    const float mean = kRms ? 0.0F : mean_in[row];
    const float rstd = rstd_in[row];
    RowGradients<kVectors> values;
    const float2 sums = row_sums<kGroup>(load_gradients<T, W, kRms, kGroup>(
        row, dim, mean, rstd, grad_y, x, weight, values, weight_sums, bias_sums));
    const float mean_g = kRms ? 0.0F : sums.x * inverse;
    const float mean_gn = sums.y * inverse;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = column_of<kGroup>(v);
      if (column < dim) {
        float grad[kVector] = {};
        if (grad_skip != nullptr) {
          load8(grad_skip + row * dim + column, 1, grad);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          grad[j] += rstd * (values.g[v][j] - mean_g - values.n[v][j] * mean_gn);
        }
        store8(grad_x + row * dim + column, 1, grad);
        if constexpr (kAdds) {
          store_branch_gradient(dropout, row * dim + column, v, grad, grad_branch, branch_sums);
        }
      }
    }
  }
  if (parts.weight != nullptr) {
    write_part<kGroup, kVectors>(dim, weight_sums, parts.weight);
  }
  if (parts.bias != nullptr) {
    write_part<kGroup, kVectors>(dim, bias_sums, parts.bias);
  }
  if constexpr (kAdds) {
    if (parts.branch_bias != nullptr) {
      write_branch_part<kGroup>(dim, branch_sums, parts.branch_bias);
    }
  }
}

template <int kNumber>
struct Constant {
  static constexpr int value = kNumber;
};

/// Calls `call` with the threads of a row and the vectors of a thread.
template <typename Call>
cudaError_t with_row_shape(int64_t dim, Call&& call) {
  const auto vectors = [dim](int threads) {
    return (dim + int64_t{threads} * kVector - 1) / (int64_t{threads} * kVector);
  };
  switch (vectors(kWarp)) {
    case 1:
      return call(Constant<kWarp>{}, Constant<1>{});
    case 2:
      return call(Constant<kWarp>{}, Constant<2>{});
    case 3:
      return call(Constant<kWarp>{}, Constant<3>{});
    case kMaxVectors:
      return call(Constant<kWarp>{}, Constant<kMaxVectors>{});
    default:
      return vectors(kThreads) <= 2 ? call(Constant<kThreads>{}, Constant<2>{})
                                    : call(Constant<kThreads>{}, Constant<kMaxVectors>{});
  }
}

template <typename Call>
cudaError_t with_types(const NormRows& shape, Call&& call) {
  return with_compute_type(shape.element, [&](auto tag) {
    const auto with_weights = [&](auto weights) {
      return shape.is_rms ? call(tag, weights, Constant<1>{}) : call(tag, weights, Constant<0>{});
    };
    return shape.weights == Element::Float32 ? with_weights(TypeTag<float>{}) : with_weights(tag);
  });
}

/// Calls `call` with the types of both, RMSNorm or not, a branch or not, and the shape of a row.
template <typename Call>
cudaError_t with_kernel(const NormRows& shape, bool adds, Call&& call) {
  if (adds && shape.is_rms) {
    return cudaErrorInvalidValue;
  }
  return with_types(shape, [&](auto tag, auto weights, auto rms) {
    return with_row_shape(shape.dim, [&](auto group, auto vectors) {
      if constexpr (decltype(rms)::value == 0) {
        if (adds) {
          call(tag, weights, rms, Constant<1>{}, group, vectors);
          return cudaGetLastError();
        }
      }
      call(tag, weights, rms, Constant<0>{}, group, vectors);
      return cudaGetLastError();
    });
  });
}

int rows_per_block(int64_t dim) {
  return dim <= kWarp * kVector * kMaxVectors ? kThreads / kWarp : 1;
}

}  // namespace

cudaError_t launch_layer_norm(const NormRows& shape, const NormBranch& branch, const void* x,
                              const void* weight, const void* bias, void* sum, void* y, float* mean,
                              float* rstd, cudaStream_t stream) {
  return with_kernel(
      shape, branch.residual != nullptr,
      [&](auto tag, auto weights, auto rms, auto adds, auto group, auto vectors) {
        using T = typename decltype(tag)::type;
        using W = typename decltype(weights)::type;
        forward<T, W, decltype(rms)::value == 1, decltype(adds)::value == 1, decltype(group)::value,
                decltype(vectors)::value>
            <<<num_blocks(shape.rows, rows_per_block(shape.dim)), kThreads, 0, stream>>>(
                shape.rows, static_cast<int>(shape.dim), shape.eps, branch,
                static_cast<const T*>(x), static_cast<const W*>(weight),
                static_cast<const W*>(bias), static_cast<T*>(sum), static_cast<T*>(y), mean, rstd);
      });
}

int num_norm_parts(const NormRows& shape, int multiprocessors) {
  const int64_t needed = (shape.rows + rows_per_block(shape.dim) - 1) / rows_per_block(shape.dim);
  return static_cast<int>(
      std::clamp<int64_t>(needed, 1, int64_t{shape.is_rms ? 3 : 2} * multiprocessors));
}

cudaError_t launch_layer_norm_backward(const NormRows& shape, bool adds_branch,
                                       const DropoutDraws& draws, const void* grad_y,
                                       const void* grad_skip, const void* x, const void* weight,
                                       const float* mean, const float* rstd, void* grad_x,
                                       void* grad_branch, const NormParts& parts, int num_parts,
                                       cudaStream_t stream) {
  return with_kernel(shape, adds_branch,
                     [&](auto tag, auto weights, auto rms, auto adds, auto group, auto vectors) {
                       using T = typename decltype(tag)::type;
                       using W = typename decltype(weights)::type;
                       backward<T, W, decltype(rms)::value == 1, decltype(adds)::value == 1,
                                decltype(group)::value, decltype(vectors)::value>
                           <<<static_cast<unsigned>(num_parts), kThreads, 0, stream>>>(
                               shape.rows, static_cast<int>(shape.dim), draws,
                               static_cast<const T*>(grad_y), static_cast<const T*>(grad_skip),
                               static_cast<const T*>(x), static_cast<const W*>(weight), mean, rstd,
                               static_cast<T*>(grad_x), static_cast<T*>(grad_branch), parts);
                     });
}

}  // namespace ddp::ops::detail
