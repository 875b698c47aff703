// SPDX-License-Identifier: Apache-2.0
// BatchNorm, ReLU and the 3x3 max pool of stride 2 and padding 1, in one pass each way.
//
// Window (p, q) covers rows 2p-1 .. 2p+1 and columns 2q-1 .. 2q+1 of x. Its positions are numbered
// 0..8 row by row. Only four windows touch the pixels (2p, 2q) .. (2p+1, 2q+1): (p, q), (p, q+1),
// (p+1, q) and (p+1, q+1).
#include "ops/vision/batch_norm_device.cuh"

namespace ddp::ops::detail {
namespace {

constexpr unsigned kNothing = 15;

/// A row of the pooled activation as its image, row and column.
struct Place {
  unsigned image, row, column;

  __device__ Place(unsigned index, const PoolShape& shape) {
    const auto width = static_cast<unsigned>(shape.pooled_width);
    const auto height = static_cast<unsigned>(shape.pooled_height);
    column = index % width;
    row = index / width % height;
    image = index / (width * height);
  }
};

/// Two adjacent 16-bit elements, compared without conversion.
template <typename T>
struct Two {
  using Type = typename Pair<T>::Type;
  static __device__ Type of(const unsigned& bits) { return *reinterpret_cast<const Type*>(&bits); }
  static __device__ unsigned bits(const Type& pair) {
    return *reinterpret_cast<const unsigned*>(&pair);
  }
  /// All ones in each half where a > b.
  static __device__ unsigned greater(unsigned a, unsigned b) { return __hgt2_mask(of(a), of(b)); }
  /// NaN if either is NaN.
  static __device__ unsigned larger(unsigned a, unsigned b) {
    return bits(__hmax2_nan(of(a), of(b)));
  }
};

/// Order of eight channels' values: relu(bn(x)) grows with x, falls for a negative scale, and is
/// constant for a zero scale. (x & keep) ^ flip grows with relu(bn(x)).
struct Order {
  unsigned keep[4], flip[4];

  __device__ explicit Order(const ScaleShift& bn) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keep[i] =
          (bn.scale[2 * i] == 0 ? 0u : 0xffffu) | (bn.scale[2 * i + 1] == 0 ? 0u : 0xffff0000u);
      flip[i] = (bn.scale[2 * i] < 0 ? 0x8000u : 0u) | (bn.scale[2 * i + 1] < 0 ? 0x80000000u : 0u);
    }
  }
};

/// The largest value of a window in that order. Each half of `winner` is its position.
struct Best {
  unsigned key[4], winner[4];

  template <typename T>
  __device__ void take(const Vector& packed, const Order& order, unsigned place) {
    const unsigned elements[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned candidate = (elements[i] & order.keep[i]) ^ order.flip[i];
      const unsigned wins = Two<T>::greater(candidate, key[i]);
      winner[i] = (winner[i] & ~wins) | (place * 0x10001u & wins);
      key[i] = Two<T>::larger(candidate, key[i]);
    }
  }
};

__device__ unsigned byte_of(const uint2& bytes, int i) {
  return ((i < 4 ? bytes.x : bytes.y) >> (8 * (i & 3))) & 255u;
}

/// Writes the pooled values after the ReLU and, if requested, the positions of the maxima.
template <typename T>
__device__ void write_pooled(const PoolForwardCall& call, int at, const Best& best,
                             const ScaleShift& bn) {
  float values[8];
  unpack<T>(make_uint4(best.key[0], best.key[1], best.key[2], best.key[3]), values);
  unsigned places[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = values[i] * bn.scale[i] + bn.shift[i];
    const bool passes = !(value <= 0);  // NaN passes, as through at::relu
    const unsigned winner = best.winner[i / 2] >> (16 * (i & 1)) & 15u;
    places[i / 4] |= (passes ? winner : kNothing) << (8 * (i & 3));
    values[i] = passes ? value : 0;
  }
  static_cast<Vector*>(call.y)[at] = pack<T>(values);
  if (call.index != nullptr) {
    reinterpret_cast<uint2*>(call.index)[at] = make_uint2(places[0], places[1]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) forward_kernel(PoolForwardCall call) {
  const BatchNormGrid& grid = call.grid;
  const PoolShape& shape = call.shape;
  const Lane lane(grid);
  const auto* x = static_cast<const Vector*>(call.x);
  ScaleShift bn(call.bn, lane.vector);
  const Order order(bn);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bn.scale[i] = fabsf(bn.scale[i]);  // the keys contain the sign
  }
  for (int row = lane.row; row < grid.rows; row += lane.step) {
    const Place place(static_cast<unsigned>(row), shape);
    const Vector* image =
        x + static_cast<size_t>(place.image) * shape.height * shape.width * grid.vectors +
        lane.vector;
    Vector window[9];
    bool inside[9];
#pragma unroll
    for (int k = 0; k < 9; ++k) {
      const int h = 2 * static_cast<int>(place.row) - 1 + k / 3;
      const int w = 2 * static_cast<int>(place.column) - 1 + k % 3;
      inside[k] = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
      const int at = inside[k] ? h * shape.width + w : 0;
      window[k] = image[static_cast<size_t>(at) * grid.vectors];
    }
    Best best;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      best.key[i] = Pair<T>::kLowest;
      best.winner[i] = kNothing * 0x10001u;
    }
#pragma unroll
    for (int k = 0; k < 9; ++k) {
      if (inside[k]) {
        best.take<T>(window[k], order, k);
      }
    }
    write_pooled<T>(call, row * grid.vectors + lane.vector, best, bn);
  }
}

/// The gradients of the four windows that touch a quad of pixels, and the positions of their
/// maxima.
struct Windows {
  float grad[4][8];
  uint2 winner[4];
};

template <typename T>
__device__ void load_windows(const PoolBackwardCall& call, const Lane& lane, int row,
                             const Place& place, Windows& windows) {
  const BatchNormGrid& grid = call.grid;
  Vector first[4], second[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const bool inside =
        (w < 2 || place.row + 1 < static_cast<unsigned>(call.shape.pooled_height)) &&
        ((w & 1) == 0 || place.column + 1 < static_cast<unsigned>(call.shape.pooled_width));
    const int pixel = inside ? row + (w >> 1) * call.shape.pooled_width + (w & 1) : row;
    const int at = pixel * grid.vectors + lane.vector;
    windows.winner[w] =
        inside ? reinterpret_cast<const uint2*>(call.index)[at] : make_uint2(~0u, ~0u);
    first[w] = static_cast<const Vector*>(call.grad)[at];
    if (call.grad2 != nullptr) {
      second[w] = static_cast<const Vector*>(call.grad2)[at];
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    unpack<T>(first[w], windows.grad[w]);
    if (call.grad2 != nullptr) {
      add_to<T>(windows.grad[w], second[w]);
    }
  }
}

/// The gradient that reaches pixel 2 * (z / 2), z % 2 of the quad.
__device__ void collect(const Windows& windows, int z, float (&d)[8]) {
  // [pixel][window]: the pixel's position in the window; 99: not covered by the window.
  constexpr unsigned kPlace[4][4] = {{4, 99, 99, 99}, {5, 3, 99, 99}, {7, 99, 1, 99}, {8, 6, 2, 0}};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    d[i] = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (kPlace[z][w] != 99 && byte_of(windows.winner[w], i) == kPlace[z][w]) {
        d[i] += windows.grad[w][i];
      }
    }
  }
}

/// The four vectors of x under a pooled element, and their indices; -1: outside.
struct Inputs {
  Vector vectors[4];
  int at[4];

  __device__ __forceinline__ Inputs(const PoolBackwardCall& call, const Lane& lane,
                                    const Place& place) {
    const PoolShape& shape = call.shape;
    const auto* x = static_cast<const Vector*>(call.target.x);
#pragma unroll
    for (int z = 0; z < 4; ++z) {
      const int h = 2 * static_cast<int>(place.row) + (z >> 1);
      const int w = 2 * static_cast<int>(place.column) + (z & 1);
      const bool inside = h < shape.height && w < shape.width;
      at[z] = inside ? ((static_cast<int>(place.image) * shape.height + h) * shape.width + w) *
                               call.grid.vectors +
                           lane.vector
                     : -1;
      vectors[z] = x[inside ? at[z] : lane.vector];
    }
  }
};

template <typename T, bool kApply>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(PoolBackwardCall call) {
  const BatchNormGrid& grid = call.grid;
  const PoolShape& shape = call.shape;
  const Lane lane(grid);
  float mean[8];
  Coefficients with;
  if constexpr (kApply) {
    with = Coefficients(call.target.coefficients, grid.vectors, lane.vector);
  } else {
    load8(call.target.mean, lane.vector, mean);
  }
  float sums[2][8] = {};
  for (int row = lane.row; row < grid.rows; row += lane.step) {
    const Place place(static_cast<unsigned>(row), shape);
    const Inputs inputs(call, lane, place);
    Windows windows;
    load_windows<T>(call, lane, row, place, windows);
#pragma unroll
    for (int z = 0; z < 4; ++z) {
      if (inputs.at[z] < 0) {
        continue;
      }
      float values[8], d[8];
      unpack<T>(inputs.vectors[z], values);
      collect(windows, z, d);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (kApply) {
          values[i] = with.a[i] * d[i] + (with.b[i] * values[i] + with.c[i]);
        } else {
          sums[0][i] += d[i];
          sums[1][i] += d[i] * (values[i] - mean[i]);
        }
      }
      if constexpr (kApply) {
        static_cast<Vector*>(call.target.grad_x)[inputs.at[z]] = pack<T>(values);
      }
    }
  }
  if constexpr (!kApply) {
    double totals[2];
    if (grid_sums<2>(sums, grid, call.scratch, totals)) {
      if (static_cast<int>(threadIdx.x) < 8 * grid.slice) {
        const int channel = static_cast<int>(blockIdx.y) * 8 * grid.slice + threadIdx.x;
        const int64_t rows = static_cast<int64_t>(shape.batch) * shape.height * shape.width;
        finish_backward(call.target, channel, 8 * grid.vectors, rows, totals[0], totals[1]);
      }
    }
  }
}

template <typename T>
void backward(const PoolBackwardCall& call, dim3 blocks, cudaStream_t stream) {
  if (call.apply) {
    backward_kernel<T, true><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    backward_kernel<T, false><<<blocks, kThreads, 0, stream>>>(call);
  }
}

}  // namespace

cudaError_t launch_pool_forward(const PoolForwardCall& call, Half dtype, cudaStream_t stream) {
  const dim3 blocks(call.grid.blocks, call.grid.slices);
  if (dtype == Half::Bfloat16) {
    forward_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    forward_kernel<__half><<<blocks, kThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

cudaError_t launch_pool_backward(const PoolBackwardCall& call, Half dtype, cudaStream_t stream) {
  const dim3 blocks = half_grid(call.grid);
  if (dtype == Half::Bfloat16) {
    backward<__nv_bfloat16>(call, blocks, stream);
  } else {
    backward<__half>(call, blocks, stream);
  }
  return cudaGetLastError();
}

}  // namespace ddp::ops::detail
