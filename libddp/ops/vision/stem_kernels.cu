// SPDX-License-Identifier: Apache-2.0
#include "ops/kernel_types.cuh"
#include "ops/vision/stem_kernels.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kPad = 3;
constexpr int kFilterSize = 7;
// More blocks per image read the image more often from L2. Fewer blocks leave SMs idle at small
// batches.
constexpr int kPatchBlocks = 4;
constexpr size_t kMaxSharedBytes = 48 * 1024;

/// One thread writes the 16 channels of one cell.
template <typename In, typename Out>
__global__ void space_to_depth(StemImage image, Out* out) {
  const int cell_columns = image.columns + kPad;
  const int cells = (image.rows + kPad) * cell_columns;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{image.batch} * cells) {
    return;
  }
  const int64_t n = index / cells;
  const int cell = static_cast<int>(index - n * cells);
  const int row = 2 * (cell / cell_columns) - kPad;
  const int column = 2 * (cell % cell_columns) - kPad;
  const In* in = static_cast<const In*>(image.data) + n * image.strides[0];
  Vector8<Out> halves[2];
#pragma unroll
  for (int phase = 0; phase < 4; ++phase) {
    const int h = row + phase / 2, w = column + phase % 2;
    const bool inside = h >= 0 && h < image.height && w >= 0 && w < image.width;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float value =
          inside && c < 3
              ? to_float(in[c * image.strides[1] + h * image.strides[2] + w * image.strides[3]])
              : 0.0F;
      halves[phase / 2].values[phase % 2 * 4 + c] = from_float<Out>(value);
    }
  }
  uint4* target = reinterpret_cast<uint4*>(out + index * 16);
  target[0] = halves[0].bits[0];
  target[1] = halves[1].bits[0];
}

/// A block writes the patches of some rows of one image. It holds the covered image rows, padded,
/// with interleaved channels, so a filter's row is 21 consecutive values.
template <typename In, typename Out>
__global__ void patches(StemImage image, int rows_of_block, Out* out) {
  extern __shared__ uint4 shared[];
  Out* padded = reinterpret_cast<Out*>(shared);
  const int width = 3 * (image.width + 2 * kPad);
  const int first_row = static_cast<int>(blockIdx.y) * rows_of_block;
  const int rows = min(rows_of_block, image.rows - first_row);
  const int lines = 2 * rows + kFilterSize - 2;
  const In* in = static_cast<const In*>(image.data) + blockIdx.x * image.strides[0];
  constexpr int kWarp = 32;
  for (int line = static_cast<int>(threadIdx.x) / kWarp; line < lines; line += kThreads / kWarp) {
    const int h = 2 * first_row + line - kPad;
    const bool line_exists = h >= 0 && h < image.height;
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < width; i += kWarp) {
      const int c = i % 3, w = i / 3 - kPad;
      const bool inside = line_exists && w >= 0 && w < image.width;
      padded[line * width + i] = from_float<Out>(
          inside ? to_float(in[c * image.strides[1] + h * image.strides[2] + w * image.strides[3]])
                 : 0.0F);
    }
  }
  __syncthreads();
  constexpr int kVectors = kStemPatchColumns / 8;
  uint4* target = reinterpret_cast<uint4*>(out) + (int64_t{blockIdx.x} * image.rows + first_row) *
                                                      image.columns * int64_t{kVectors};
  for (int i = static_cast<int>(threadIdx.x); i < rows * image.columns * kVectors; i += kThreads) {
    const int pixel = i / kVectors, first = i % kVectors * 8;
    const Out* corner = padded + 2 * (pixel / image.columns) * width + 6 * (pixel % image.columns);
    // The eight values are in one or two rows of the filter.
    const int row = first / 21, column = first - row * 21;
    const Out* here = corner + row * width + column;
    const Out* next = here + width - 21;
    Vector8<Out> vector;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const Out* from = column + j < 21 ? here : next;
      vector.values[j] = first + j < kStemPatch ? from[j] : from_float<Out>(0.0F);
    }
    target[i] = vector.bits[0];
  }
}

struct Tap {
  int channel, row, column;
  bool exists;
};

__device__ Tap tap_at(StemPacking packing, int position) {
  if (packing == StemPacking::Im2col) {
    return {position % 3, position / 21, position % 21 / 3, position < kStemPatch};
  }
  const int phase = position % 16 / 4, channel = position % 4;
  const int row = position / 64 * 2 + phase / 2, column = position / 16 % 4 * 2 + phase % 2;
  return {channel, row, column, channel < 3 && row < kFilterSize && column < kFilterSize};
}

int packed_size(StemPacking packing) {
  return packing == StemPacking::Im2col ? kStemPatchColumns : 256;
}

template <typename T, typename Packed>
__global__ void pack_filter(StemFilter filter, StemPacking packing, int size, Packed* packed) {
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= filter.filters * size) {
    return;
  }
  const Tap tap = tap_at(packing, index % size);
  const T* from = static_cast<const T*>(filter.data) + index / size * filter.strides[0];
  packed[index] = from_float<Packed>(
      tap.exists ? to_float(from[tap.channel * filter.strides[1] + tap.row * filter.strides[2] +
                                 tap.column * filter.strides[3]])
                 : 0.0F);
}

template <typename T, typename Packed>
__global__ void unpack_filter(StemFilter filter, StemPacking packing, int size,
                              const Packed* packed, bool accumulates) {
  const int index = blockIdx.x * kThreads + threadIdx.x;
  const Tap tap = tap_at(packing, index % size);
  if (index >= filter.filters * size || !tap.exists) {
    return;
  }
  T* to = static_cast<T*>(filter.data) + index / size * filter.strides[0] +
          tap.channel * filter.strides[1] + tap.row * filter.strides[2] +
          tap.column * filter.strides[3];
  const float value = to_float(packed[index]);
  *to = from_float<T>(accumulates ? to_float(*to) + value : value);
}

int rows_of_block(int rows) {
  return (rows + kPatchBlocks - 1) / kPatchBlocks;
}

size_t shared_bytes(int rows, int width) {
  return sizeof(__half) * 3 * static_cast<size_t>(2 * rows + kFilterSize - 2) *
         static_cast<size_t>(width + 2 * kPad);
}

}  // namespace

cudaError_t launch_stem_space_to_depth(const StemImage& image, void* out, Element out_element,
                                       cudaStream_t stream) {
  return with_image_type(image.element, [&](auto in) {
    return with_compute_type(out_element, [&](auto to) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(to)::type;
      const int64_t cells = int64_t{image.batch} * (image.rows + kPad) * (image.columns + kPad);
      space_to_depth<In, Out>
          <<<num_blocks(cells, kThreads), kThreads, 0, stream>>>(image, static_cast<Out*>(out));
      return cudaGetLastError();
    });
  });
}

bool stem_patches_fit(int64_t height, int64_t width) {
  const int rows = rows_of_block(static_cast<int>((height - 1) / 2 + 1));
  return shared_bytes(rows, static_cast<int>(width)) <= kMaxSharedBytes;
}

cudaError_t launch_stem_patches(const StemImage& image, void* out, Element out_element,
                                cudaStream_t stream) {
  return with_image_type(image.element, [&](auto in) {
    return with_compute_type(out_element, [&](auto to) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(to)::type;
      const int rows = rows_of_block(image.rows);
      const auto parts = static_cast<unsigned>((image.rows + rows - 1) / rows);
      const dim3 grid(static_cast<unsigned>(image.batch), parts);
      patches<In, Out><<<grid, kThreads, shared_bytes(rows, image.width), stream>>>(
          image, rows, static_cast<Out*>(out));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_stem_pack_filter(const StemFilter& filter, StemPacking packing, void* packed,
                                    Element packed_element, cudaStream_t stream) {
  return with_float_type(filter.element, [&](auto in) {
    return with_compute_type(packed_element, [&](auto to) {
      using In = typename decltype(in)::type;
      using Packed = typename decltype(to)::type;
      const int size = packed_size(packing);
      pack_filter<In, Packed>
          <<<num_blocks(int64_t{filter.filters} * size, kThreads), kThreads, 0, stream>>>(
              filter, packing, size, static_cast<Packed*>(packed));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_stem_unpack_filter(const StemFilter& filter, StemPacking packing,
                                      const void* packed, Element packed_element, bool accumulates,
                                      cudaStream_t stream) {
  return with_float_type(filter.element, [&](auto to) {
    return with_float_type(packed_element, [&](auto in) {
      using Out = typename decltype(to)::type;
      using Packed = typename decltype(in)::type;
      const int size = packed_size(packing);
      unpack_filter<Out, Packed>
          <<<num_blocks(int64_t{filter.filters} * size, kThreads), kThreads, 0, stream>>>(
              filter, packing, size, static_cast<const Packed*>(packed), accumulates);
      return cudaGetLastError();
    });
  });
}

}  // namespace ddp::ops::detail
