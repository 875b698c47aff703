// SPDX-License-Identifier: Apache-2.0
// With interleaved channels, a patch is one run of values per filter row in the image. So no patch
// is stored: the padded image rows are in shared memory. A factor's element is read at the pixel's
// corner plus the offset of the patch's column.
#include <algorithm>

#include "ops/vision/stem_tiles.cuh"

namespace ddp::ops::detail {
namespace {

/// Whether the filters are contiguous in memory, in the order of the computation.
template <typename Shape>
bool is_dense(const StemProducts& call) {
  const StemFilter& filter = call.filter;
  return filter.element == call.element && filter.strides[0] == Shape::kPatch &&
         filter.strides[1] == 1 && filter.strides[2] == Shape::kPatchRow &&
         filter.strides[3] == 3 && Lines<Shape>::is_aligned(filter.data);
}

/// Loads filters, each followed by zeros.
template <typename Shape, typename W, typename T>
__device__ void load_filter(const StemFilter& filter, T* to) {
  constexpr int kWarps = kForwardThreads / kWarp;
  constexpr int kFilterPitch = Sizes<Shape>::kFilterPitch;
  for (int k = static_cast<int>(threadIdx.x) % kWarp; k < kFilterPitch; k += kWarp) {
    const W* column = static_cast<const W*>(filter.data) + k % 3 * filter.strides[1] +
                      k / Shape::kPatchRow * filter.strides[2] +
                      k % Shape::kPatchRow / 3 * filter.strides[3];
#pragma unroll 8
    for (int row = static_cast<int>(threadIdx.x) / kWarp; row < kFilters; row += kWarps) {
      to[row * kFilterPitch + k] =
          from_float<T>(k < Shape::kPatch ? to_float(column[row * filter.strides[0]]) : 0.0F);
    }
  }
}

/// Same, from unpadded filters in shared memory.
template <typename Shape, typename T>
__device__ void space_filter(const T* from, T* to) {
  constexpr int kWarps = kForwardThreads / kWarp;
  constexpr int kFilterPitch = Sizes<Shape>::kFilterPitch;
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x) / kWarp; row < kFilters; row += kWarps) {
#pragma unroll
    for (int i = 0; i < (kFilterPitch + kWarp - 1) / kWarp; ++i) {
      const int k = i * kWarp + static_cast<int>(threadIdx.x) % kWarp;
      if (k < kFilterPitch) {
        to[row * kFilterPitch + k] =
            k < Shape::kPatch ? from[row * Shape::kPatch + k] : from_float<T>(0.0F);
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ unsigned pair_of(T low, T high) {
  return static_cast<unsigned>(reinterpret_cast<const unsigned short&>(low)) |
         static_cast<unsigned>(reinterpret_cast<const unsigned short&>(high)) << 16;
}

/// A warp's 32 pixels times 64 filters.
template <typename Shape, typename T>
__device__ void multiply_patches(const T* padded, const Lines<Shape>& lines, const StemImage& image,
                                 const T* filter, float (&sums)[2][8][4]) {
  constexpr int kFilterPitch = Sizes<Shape>::kFilterPitch, kPatch = Shape::kPatch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = static_cast<int>(threadIdx.x) / kWarp * 32;
  int corners[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    corners[i] = lines.corner(first + i * 8 + lane / 4, image);
  }
  const unsigned filter_row =
      shared_address(filter + (lane % 8 + lane / 16 * 8) * kFilterPitch + lane / 8 % 2 * 8);
#pragma unroll
  for (int step = 0; step < Sizes<Shape>::kSteps; ++step) {
    unsigned a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = step * kStep + half * 8 + lane % 4 * 2;
      const int low = lines.offset(k), high = lines.offset(k + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T zero = from_float<T>(0.0F);
        a[i / 2][half * 2 + i % 2] = pair_of(k < kPatch ? padded[corners[i] + low] : zero,
                                             k + 1 < kPatch ? padded[corners[i] + high] : zero);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned b[4];
      load_matrices(b, filter_row + (n * 16 * kFilterPitch + step * kStep) * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply_add<T>(sums[m][2 * n], a[m], b[0], b[1]);
        multiply_add<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// Writes through shared memory, so each pixel's 128 bytes are one contiguous write.
template <typename T>
__device__ void write_pixels(const float (&sums)[8][4], T* stage, T* out, int pixels) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<unsigned*>(stage + (lane / 4 + half * 8) * kOutPitch + n * 8 +
                                   lane % 4 * 2) =
          pair_of(from_float<T>(sums[n][half * 2]), from_float<T>(sums[n][half * 2 + 1]));
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * kVectors; i += kWarp) {
    if (i / kVectors < pixels) {
      reinterpret_cast<uint4*>(out)[i] =
          *reinterpret_cast<const uint4*>(stage + i / kVectors * kOutPitch + i % kVectors * 8);
    }
  }
  __syncwarp();
}

template <typename Shape, typename In, typename W, typename T>
__global__ void __launch_bounds__(kForwardThreads)
    forward(StemProducts call, Lines<Shape> lines, int tiles, bool dense_filter, T* out) {
  extern __shared__ uint4 shared[];
  T* filter = reinterpret_cast<T*>(shared);
  T* stages = filter + kFilters * Sizes<Shape>::kFilterPitch;  // first holds the unpadded filter
  T* padded = stages + Sizes<Shape>::kStage;
  const StemImage& image = call.image;
  const int first = static_cast<int>(threadIdx.x) / kWarp * 32;
  if (dense_filter) {
    const unsigned to = shared_address(stages);
    for (int i = static_cast<int>(threadIdx.x); i < kFilters * Shape::kPatch / 8;
         i += kForwardThreads) {
      copy_async(to + i * 16, static_cast<const uint4*>(call.filter.data) + i, true);
    }
  } else {
    load_filter<Shape, W>(call.filter, filter);
  }
  clear_sides<kForwardThreads>(lines, padded);
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += gridDim.x) {
    __syncthreads();  // the previous tile has been read
    load_lines<kForwardThreads, In>(image, lines, tile, padded);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    if (dense_filter && tile == static_cast<int>(blockIdx.x)) {
      space_filter<Shape>(stages, filter);
      __syncthreads();
    }
    float sums[2][8][4] = {};
    multiply_patches(padded, lines, image, filter, sums);
    const int row = tile % lines.tiles_of_image * lines.rows;
    const int pixels = min(lines.rows, image.rows - row) * image.columns;
    const int64_t begin =
        (int64_t{tile} / lines.tiles_of_image * image.rows + row) * image.columns + first;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      write_pixels(sums[m], stages + first / 32 * 16 * kOutPitch, out + (begin + m * 16) * kFilters,
                   pixels - first - m * 16);
    }
  }
}

/// Rows of 128 bytes, with 16-byte vectors permuted within each eight rows: eight consecutive rows
/// are read without bank conflicts.
__device__ __forceinline__ int swizzled(int row, int vector) {
  return row * kRowBytes + ((vector ^ (row & 7)) << 4);
}

/// 64 filters times a warp's columns, over its half of a tile's pixels.
template <int kColumnTiles, typename T>
__device__ void multiply_gradients(unsigned grad, const T* padded, const int* corners,
                                   const int (&offsets)[kColumnTiles], int half,
                                   float (&sums)[4][kColumnTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 0; step < kPixels / kStep / 2; ++step) {
    const int first = (half * (kPixels / kStep / 2) + step) * kStep;
    unsigned a[4][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      load_transposed(a[m],
                      grad + swizzled(first + lane % 8 + lane / 16 * 8, m * 2 + lane / 8 % 2));
    }
    const int pixel = first + lane % 4 * 2;
    const int at[4] = {corners[pixel], corners[pixel + 1], corners[pixel + 8], corners[pixel + 9]};
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const T* column = padded + offsets[n];
      const unsigned b0 = pair_of(column[at[0]], column[at[1]]);
      const unsigned b1 = pair_of(column[at[2]], column[at[3]]);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        multiply_add<T>(sums[m][n], a[m], b0, b1);
      }
    }
  }
}

/// The lines of a tile, stored after its gradient.
template <typename T>
__device__ T* lines_of(uint4* buffer) {
  return reinterpret_cast<T*>(buffer + kPixels * kVectors);
}

/// Loads a tile. Copies may be pending on return.
template <typename In, typename Shape, typename T>
__device__ void fetch_tile(const StemImage& image, const Lines<Shape>& lines, int tile,
                           const T* grad, uint4* buffer) {
  const int row = tile % lines.tiles_of_image * lines.rows;
  const int pixels = min(lines.rows, image.rows - row) * image.columns;
  const T* from =
      grad + (int64_t{tile} / lines.tiles_of_image * image.rows + row) * image.columns * kFilters;
  const unsigned to = shared_address(buffer);
  for (int i = static_cast<int>(threadIdx.x); i < kPixels * kVectors; i += kGradThreads) {
    const bool inside = i / kVectors < pixels;
    copy_async(to + swizzled(i / kVectors, i % kVectors), from + (inside ? i * 8 : 0), inside);
  }
  load_lines<kGradThreads, In>(image, lines, tile, lines_of<T>(buffer));
}

/// Adds the halves in a fixed order and writes rows.
template <typename Shape, int kColumnTiles>
__device__ void write_sums(const float (&sums)[4][kColumnTiles][4], int first_column, int half,
                           float* both, float* part) {
  constexpr int kSumPitch = Sizes<Shape>::kSumPitch, kPatch = Shape::kPatch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int turn = 0; turn < 2; ++turn) {
    if (half == turn) {
#pragma unroll
      for (int i = 0; i < 4 * kColumnTiles * 2; ++i) {
        const int m = i / (kColumnTiles * 2), n = i / 2 % kColumnTiles, row = i % 2 * 8;
        const float* pair = &sums[m][n][i % 2 * 2];
        float2& there = *reinterpret_cast<float2*>(both + (m * 16 + row + lane / 4) * kSumPitch +
                                                   first_column + n * 8 + lane % 4 * 2);
        there = turn == 0 ? make_float2(pair[0], pair[1])
                          : make_float2(there.x + pair[0], there.y + pair[1]);
      }
    }
    __syncthreads();
  }
  for (int filter = static_cast<int>(threadIdx.x) / kWarp; filter < kFilters;
       filter += kGradThreads / kWarp) {
    for (int column = lane; column < kPatch; column += kWarp) {
      part[filter * kPatch + column] = both[filter * kSumPitch + column];
    }
  }
}

template <typename Shape, typename In, typename T>
__global__ void __launch_bounds__(kGradThreads, Sizes<Shape>::kGradBlocks)
    gradient(StemProducts call, Lines<Shape> lines, int tiles, const T* grad, float* partial) {
  constexpr int kColumnTiles = Sizes<Shape>::kColumnTiles;
  extern __shared__ uint4 shared[];
  __shared__ int corners[kPixels];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first_column = warp % kColumnWarps * kColumnTiles * 8, half = warp / kColumnWarps;
  if (threadIdx.x < kPixels) {
    corners[threadIdx.x] = lines.corner(static_cast<int>(threadIdx.x), call.image);
  }
  int offsets[kColumnTiles];
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
    const int column = first_column + n * 8 + lane / 4;
    offsets[n] = lines.offset(column < Shape::kPatch ? column : 0);
  }
  // One buffer is filled while the other is read.
  uint4 *now = shared, *next = shared + kPixels * kVectors + lines.size() / 8;
  clear_sides<kGradThreads>(lines, lines_of<T>(now));
  clear_sides<kGradThreads>(lines, lines_of<T>(next));
  if (lines.vectors == 0) {
    __syncthreads();  // load_lines() writes the sides too
  }
  float sums[4][kColumnTiles][4] = {};
  const int step = static_cast<int>(gridDim.x);
  fetch_tile<In>(call.image, lines, static_cast<int>(blockIdx.x), grad, now);
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += step) {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();  // this tile is loaded, and the previous one has been read
    if (tile + step < tiles) {
      fetch_tile<In>(call.image, lines, tile + step, grad, next);
    }
    multiply_gradients(shared_address(now), lines_of<T>(now), corners, offsets, half, sums);
    uint4* const read = now;
    now = next;
    next = read;
  }
  __syncthreads();
  write_sums<Shape>(sums, first_column, half, reinterpret_cast<float*>(shared),
                    partial + int64_t{blockIdx.x} * kFilters * Shape::kPatch);
}

template <typename Shape>
cudaError_t launch_forward(const StemProducts& call, void* out, int num_sms, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 4;
  const Lines<Shape> lines(call);
  const size_t bytes = forward_bytes<Shape>(lines.size());
  const bool dense_filter = is_dense<Shape>(call);
  const int tiles = call.tiles(), blocks = std::min(tiles, num_sms * kBlocksPerSm);
  return with_compute_type(call.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto in, auto weight) {
      using In = typename decltype(in)::type;
      using W = typename decltype(weight)::type;
      forward<Shape, In, W, T><<<blocks, kForwardThreads, bytes, stream>>>(
          call, lines, tiles, dense_filter, static_cast<T*>(out));
      return cudaGetLastError();
    };
    return with_float_type(call.filter.element, [&](auto weight) {
      return with_image_type(call.image.element, [&](auto in) { return launch(in, weight); });
    });
  });
}

template <typename Shape>
cudaError_t launch_gradient(const StemProducts& call, const void* grad, int splits, float* partial,
                            cudaStream_t stream) {
  const Lines<Shape> lines(call);
  const size_t bytes = gradient_bytes<Shape>(lines.size());
  return with_compute_type(call.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto in) {
      using In = typename decltype(in)::type;
      gradient<Shape, In, T><<<splits, kGradThreads, bytes, stream>>>(
          call, lines, call.tiles(), static_cast<const T*>(grad), partial);
      return cudaGetLastError();
    };
    return with_image_type(call.image.element, launch);
  });
}

constexpr int kSumThreads = 256;

/// kSlots threads share four adjacent numbers. Each adds every kSlots-th part; the first thread
/// adds their sums.
template <typename Out, int kSlots>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts(const float4* partial, int splits, int vectors, int size, TapFilter filter,
              bool accumulates) {
  constexpr int kLanes = kSumThreads / kSlots;
  __shared__ float4 sums[kSlots][kLanes];
  const int slot = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int vector = static_cast<int>(blockIdx.x) * kLanes + lane;
  float4 sum = make_float4(0, 0, 0, 0);
  const auto add = [&sum](const float4& part) {
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  };
  if (vector < vectors) {
#pragma unroll 8
    for (int split = slot; split < splits; split += kSlots) {
      add(partial[int64_t{split} * vectors + vector]);
    }
  }
  sums[slot][lane] = sum;
  __syncthreads();
  if (slot > 0 || vector >= vectors) {
    return;
  }
#pragma unroll
  for (int i = 1; i < kSlots; ++i) {
    add(sums[i][lane]);
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned index = vector * 4 + j, square = size * size;
    const unsigned channel = index % filter.channels, tap = index / filter.channels;
    Out& at = static_cast<Out*>(
        filter.data)[tap / square * filter.strides[0] + channel * filter.strides[1] +
                     tap % square / size * filter.strides[2] + tap % size * filter.strides[3]];
    at = from_float<Out>(accumulates ? to_float(at) + values[j] : values[j]);
  }
}

}  // namespace

bool StemProducts::fits() const {
  return filter.filters == kFilters && image.columns * 4 <= kPixels &&
         (size == 7 ? fits_shared<StemShape<7>>(Lines<StemShape<7>>(*this).size())
                    : fits_shared<StemShape<3>>(Lines<StemShape<3>>(*this).size()));
}

cudaError_t launch_stem_forward(const StemProducts& call, void* out, int num_sms,
                                cudaStream_t stream) {
  return call.size == 7 ? launch_forward<StemShape<7>>(call, out, num_sms, stream)
                        : launch_forward<StemShape<3>>(call, out, num_sms, stream);
}

int stem_gradient_splits(const StemProducts& call, int num_sms) {
  const int blocks =
      call.size == 7 ? Sizes<StemShape<7>>::kGradBlocks : Sizes<StemShape<3>>::kGradBlocks;
  return std::min(call.tiles(), num_sms * blocks);
}

cudaError_t launch_stem_gradient(const StemProducts& call, const void* grad, int splits,
                                 float* partial, cudaStream_t stream) {
  return call.size == 7 ? launch_gradient<StemShape<7>>(call, grad, splits, partial, stream)
                        : launch_gradient<StemShape<3>>(call, grad, splits, partial, stream);
}

cudaError_t launch_sum_parts(const float* partial, int splits, int size, const TapFilter& filter,
                             bool accumulates, cudaStream_t stream) {
  // With few numbers, many threads share each number to fill the GPU.
  constexpr int kFewNumbers = 4096;
  const int vectors = filter.filters * size * size * filter.channels / 4;
  return with_float_type(filter.element, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    const auto launch = [&](auto kernel, int slots) {
      const int lanes = kSumThreads / slots;
      kernel<<<(vectors + lanes - 1) / lanes, kSumThreads, 0, stream>>>(
          reinterpret_cast<const float4*>(partial), splits, vectors, size, filter, accumulates);
      return cudaGetLastError();
    };
    return vectors < kFewNumbers ? launch(sum_parts<Out, 16>, 16) : launch(sum_parts<Out, 4>, 4);
  });
}

}  // namespace ddp::ops::detail
