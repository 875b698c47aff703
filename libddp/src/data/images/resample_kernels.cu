// SPDX-License-Identifier: Apache-2.0
// Compiled without contraction of products and sums (CMakeLists.txt), as on the CPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "data/images/resample_kernels.hpp"

namespace ddp::detail {
namespace {

constexpr int kThreads = 256;  // output columns per block
constexpr int kBand = 8;       // rows of it
constexpr int kFastTaps = 8;   // weights of a column in registers; wider filters read memory

// Scratch of one axis of one image: first and count of each place, then the weights. A multiple of
// 16 bytes keeps the next scratch aligned.
__host__ __device__ int64_t axis_bytes(int size, int stride) {
  return (static_cast<int64_t>(size) * (8 + 4 * stride) + 15) / 16 * 16;
}

struct AxisScratch {
  int2* range;    // [size]
  float* weight;  // [size, stride]
  __host__ __device__ AxisScratch(const RegionBatch& batch, int image, int axis) {
    const int64_t bytes = axis_bytes(batch.size, batch.stride);
    auto* at = static_cast<uint8_t*>(batch.taps) + (static_cast<int64_t>(image) * 2 + axis) * bytes;
    range = reinterpret_cast<int2*>(at);
    weight = reinterpret_cast<float*>(at + static_cast<int64_t>(batch.size) * 8);
  }
};

__global__ void make_taps(RegionBatch batch) {
  const int image = blockIdx.x, axis = blockIdx.y;
  const DeviceRegion& region = batch.regions[image];
  const ResampleAxis along = axis == 0 ? region.columns : region.rows;
  const AxisScratch scratch(batch, image, axis);
  for (int i = threadIdx.x; i < batch.size; i += blockDim.x) {
    const Taps taps = find_taps(along, i);
    scratch.range[i] = {taps.first, taps.count};
    write_weights(taps, scratch.weight + static_cast<int64_t>(i) * batch.stride);
  }
  if (threadIdx.x == 0 && axis == 0) {
    batch.target[image] = region.target;
  }
}

__device__ void store(float* out, float value) {
  *out = value;
}
__device__ void store(__nv_bfloat16* out, float value) {
  *out = __float2bfloat16_rn(value);
}
__device__ void store(__half* out, float value) {
  *out = __float2half_rn(value);
}

struct Rgb {
  float value[3];
};

// One column of a row of pixels, resized along x: the CPU's sum in the same order.
__device__ Rgb narrow(const uint8_t* in, const float* registers, const float* weight, int count) {
  Rgb sum{{0.0f, 0.0f, 0.0f}};
  if (count <= kFastTaps) {
#pragma unroll
    for (int k = 0; k < kFastTaps; ++k) {
      if (k < count) {
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          sum.value[c] += registers[k] * static_cast<float>(in[3 * k + c]);
        }
      }
    }
    return sum;
  }
  for (int k = 0; k < count; ++k) {
    for (int c = 0; c < 3; ++c) {
      sum.value[c] += weight[k] * static_cast<float>(in[3 * k + c]);
    }
  }
  return sum;
}

template <typename Out, bool kChannelsLast>
__device__ void write(const RegionBatch& batch, const DeviceRegion& region, int x, int y,
                      const Rgb& normalised) {
  const int size = batch.size;
  const int to = region.flip ? size - 1 - x : x;
  const int left = region.cutout_x - region.cutout / 2, top = region.cutout_y - region.cutout / 2;
  const bool cut = region.cutout > 0 && to >= left && to < left + region.cutout && y >= top &&
                   y < top + region.cutout;
  const int64_t plane = static_cast<int64_t>(size) * size;
  Out* out = static_cast<Out*>(batch.data) + blockIdx.y * plane * batch.channels;
  const int64_t at = static_cast<int64_t>(y) * size + to;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    if (c < batch.channels) {
      store(out + (kChannelsLast ? at * 3 + c : c * plane + at), cut ? 0.0f : normalised.value[c]);
    }
  }
}

// Copies the pixels of one column unresized, normalised as on the CPU.
template <typename Out, bool kChannelsLast>
__device__ void copy_column(const RegionBatch& batch, const DeviceRegion& region, int x,
                            int first_row, int num_rows, const Normalisation& normalisation) {
  for (int i = 0; i < num_rows; ++i) {
    const uint8_t* in = region.pixels + (first_row + i) * region.row_bytes + x * 3;
    Rgb value;
    for (int c = 0; c < 3; ++c) {
      value.value[c] = normalise_byte(in[c], normalisation.mean[c], normalisation.std[c]);
    }
    write<Out, kChannelsLast>(batch, region, x, first_row + i, value);
  }
}

// One block per image, band of rows and up to kThreads columns. A thread walks down the input rows
// of its column and narrows each row once. It adds the result to every row of the band that uses
// it, in the CPU's order.
template <typename Out, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    resample(RegionBatch batch, Normalisation normalisation) {
  const int bands = (batch.size + kBand - 1) / kBand;
  const int band = blockIdx.x % bands;
  const int x = blockIdx.x / bands * kThreads + threadIdx.x;
  const DeviceRegion region = batch.regions[blockIdx.y];
  if (x >= batch.size) {
    return;
  }
  const int first_row = band * kBand;
  const int num_rows = min(kBand, batch.size - first_row);
  if (region.same_size) {
    copy_column<Out, kChannelsLast>(batch, region, x, first_row, num_rows, normalisation);
    return;
  }
  const AxisScratch columns(batch, blockIdx.y, 0), rows(batch, blockIdx.y, 1);
  const int2 range = columns.range[x];
  const float* weight = columns.weight + static_cast<int64_t>(x) * batch.stride;
  float registers[kFastTaps];
#pragma unroll
  for (int k = 0; k < kFastTaps; ++k) {
    registers[k] = k < range.y && k < batch.stride ? weight[k] : 0.0f;
  }
  Rgb sum[kBand] = {};
  const int2 last = rows.range[first_row + num_rows - 1];
  const int end = last.x + last.y;
  const uint8_t* in = region.pixels + static_cast<int64_t>(range.x - region.x) * 3;
  for (int row = rows.range[first_row].x; row < end; ++row) {
    const Rgb narrowed =
        narrow(in + (row - region.y) * region.row_bytes, registers, weight, range.y);
#pragma unroll
    for (int i = 0; i < kBand; ++i) {
      const int2 used = i < num_rows ? rows.range[first_row + i] : int2{0, 0};
      const int k = row - used.x;
      if (k >= 0 && k < used.y) {
        const float w = rows.weight[static_cast<int64_t>(first_row + i) * batch.stride + k];
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          sum[i].value[c] += w * narrowed.value[c];
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBand; ++i) {
    if (i < num_rows) {
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        sum[i].value[c] = sum[i].value[c] * normalisation.scale[c] + normalisation.shift[c];
      }
      write<Out, kChannelsLast>(batch, region, x, first_row + i, sum[i]);
    }
  }
}

template <typename Out>
void launch_as(const RegionBatch& batch, const Normalisation& normalisation, bool channels_last,
               cudaStream_t stream) {
  const int bands = (batch.size + kBand - 1) / kBand;
  const int chunks = (batch.size + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(bands * chunks), static_cast<unsigned>(batch.num_images));
  if (channels_last && batch.channels > 1) {  // one channel has one order
    resample<Out, true><<<grid, kThreads, 0, stream>>>(batch, normalisation);
  } else {
    resample<Out, false><<<grid, kThreads, 0, stream>>>(batch, normalisation);
  }
}

}  // namespace

int64_t region_taps_bytes(int num_images, int size, int stride) {
  return int64_t{2} * num_images * axis_bytes(size, stride);
}

cudaError_t launch_region_batch(const RegionBatch& batch, const Normalisation& normalisation,
                                KernelDtype dtype, bool channels_last, cudaStream_t stream) {
  make_taps<<<dim3(static_cast<unsigned>(batch.num_images), 2), kThreads, 0, stream>>>(batch);
  switch (dtype) {
    case KernelDtype::Fp32:
      launch_as<float>(batch, normalisation, channels_last, stream);
      break;
    case KernelDtype::Bf16:
      launch_as<__nv_bfloat16>(batch, normalisation, channels_last, stream);
      break;
    case KernelDtype::Fp16:
      launch_as<__half>(batch, normalisation, channels_last, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace ddp::detail
