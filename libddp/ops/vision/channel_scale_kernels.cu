// SPDX-License-Identifier: Apache-2.0
#include "ops/kernel_types.cuh"
#include "ops/vision/channel_scale_kernels.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxWidth = 32;        // vectors of 8 channels that a block takes of one image
constexpr int kPixelsPerThread = 4;  // that are scaled

/// How blocks and threads divide an image. A slice of its channels is `width` vectors, and `rows`
/// pixels are processed at once. Neighbouring threads read neighbouring vectors.
struct Tiles {
  int vectors, slices, width, rows;

  explicit Tiles(int channels)
      : vectors(channels / 8),
        slices((vectors + kMaxWidth - 1) / kMaxWidth),
        width((vectors + slices - 1) / slices),
        rows(kThreads / width) {}
};

/// A thread's first vector and row of pixels.
struct Place {
  int first_vector, vector, row;  // first_vector: of the block
  bool exists;                    // else the thread has no vector

  __device__ Place(const Tiles& tiles, int slice)
      : first_vector(slice * tiles.width),
        vector(first_vector + static_cast<int>(threadIdx.x) % tiles.width),
        row(static_cast<int>(threadIdx.x) / tiles.width),
        exists(row < tiles.rows && vector < tiles.vectors) {}
};

/// One block per image and slice.
template <typename T, bool kOfProducts>
__global__ void __launch_bounds__(kThreads)
    channel_sums(ChannelShape shape, Tiles tiles, const T* a, const T* b, float factor, T* sums) {
  __shared__ __align__(16) float parts[kThreads * 8];  // [row][channel of the slice]
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int64_t image = block / tiles.slices;
  const Place place(tiles, block % tiles.slices);
  float sum[8] = {};
  if (place.exists) {
    const int64_t start = image * shape.pixels * shape.channels + int64_t{place.vector} * 8;
#pragma unroll 4
    for (int pixel = place.row; pixel < shape.pixels; pixel += tiles.rows) {
      const int64_t at = start + int64_t{pixel} * shape.channels;
      float values[8], others[8];
      load_vector8(a + at, values);
      if constexpr (kOfProducts) {
        load_vector8(b + at, others);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[j] += kOfProducts ? values[j] * others[j] : values[j];
      }
    }
  }
  store_vector8(parts + thread * 8, sum);
  __syncthreads();
  const int columns = 8 * min(tiles.width, tiles.vectors - place.first_vector);
  if (thread < columns) {
    float total = 0;
#pragma unroll 8
    for (int row = 0; row < tiles.rows; ++row) {
      total += parts[row * tiles.width * 8 + thread];
    }
    sums[image * shape.channels + int64_t{place.first_vector} * 8 + thread] =
        from_float<T>(total * factor);
  }
}

/// `chunks` blocks per image and slice.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    channel_scale(ChannelShape shape, Tiles tiles, int chunks, const T* x, const T* scale,
                  const T* addend, float factor, T* y) {
  const int block = static_cast<int>(blockIdx.x);
  const int64_t image = block / chunks / tiles.slices;
  const Place place(tiles, block / chunks % tiles.slices);
  if (!place.exists) {
    return;
  }
  const int64_t of_channels = image * shape.channels + int64_t{place.vector} * 8;
  float scales[8], added[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    scales[j] = 1;
    added[j] = -0.0F;  // keeps the sign of a zero
  }
  if (scale != nullptr) {
    load_vector8(scale + of_channels, scales);
  }
  if (addend != nullptr) {
    load_vector8(addend + of_channels, added);
  }
  const int64_t start = image * shape.pixels * shape.channels + int64_t{place.vector} * 8;
  const int first = block % chunks * kPixelsPerThread * tiles.rows + place.row;
  float values[kPixelsPerThread][8] = {};
  // All loads come before the stores, which the compiler must assume to write x.
#pragma unroll
  for (int i = 0; i < kPixelsPerThread; ++i) {
    const int pixel = first + i * tiles.rows;
    if (x != nullptr && pixel < shape.pixels) {
      load_vector8(x + start + int64_t{pixel} * shape.channels, values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPixelsPerThread; ++i) {
    const int pixel = first + i * tiles.rows;
    if (pixel < shape.pixels) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[i][j] = values[i][j] * scales[j] + factor * added[j];
      }
      store_vector8(y + start + int64_t{pixel} * shape.channels, values[i]);
    }
  }
}

}  // namespace

cudaError_t launch_channel_sums(const ChannelShape& shape, const void* a, const void* b,
                                float factor, void* sums, cudaStream_t stream) {
  return with_float_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Tiles tiles(shape.channels);
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(shape.batch * tiles.slices), kThreads, 0, stream>>>(
          shape, tiles, static_cast<const T*>(a), static_cast<const T*>(b), factor,
          static_cast<T*>(sums));
    };
    if (b == nullptr) {
      launch(channel_sums<T, false>);
    } else {
      launch(channel_sums<T, true>);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_channel_scale(const ChannelShape& shape, const void* x, const void* scale,
                                 const void* addend, float factor, void* y, cudaStream_t stream) {
  return with_float_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Tiles tiles(shape.channels);
    const auto chunks = static_cast<int>(num_blocks(shape.pixels, kPixelsPerThread * tiles.rows));
    // Fewer than 2^30: each block has a vector of its own.
    channel_scale<T>
        <<<static_cast<unsigned>(shape.batch * tiles.slices * chunks), kThreads, 0, stream>>>(
            shape, tiles, chunks, static_cast<const T*>(x), static_cast<const T*>(scale),
            static_cast<const T*>(addend), factor, static_cast<T*>(y));
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
