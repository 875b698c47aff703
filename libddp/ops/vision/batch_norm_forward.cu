// SPDX-License-Identifier: Apache-2.0
// Forward passes: the statistics of an activation, and its normalisation with sum and activation.
#include <algorithm>
#include <map>
#include <mutex>

#include "ops/vision/batch_norm_device.cuh"

namespace ddp::ops::detail {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) statistics_kernel(StatisticsCall call) {
  const BatchNormGrid& grid = call.grid;
  const Lane lane(grid);
  const auto* x = static_cast<const Vector*>(call.x);
  float shift[8];
  const ShiftRows shift_rows(grid.rows);
  shift_rows.load<T>(x, grid, lane.vector, shift);
  float sums[2][8] = {};
  for_each_row<kOneInput, From::End>(grid, lane, [&](int at, int distance, int count) {
    Vector packed[kOneInput];
#pragma unroll
    for (int j = 0; j < kOneInput; ++j) {
      if (j < count) {
        packed[j] = x[at + j * distance];
      }
    }
#pragma unroll
    for (int j = 0; j < kOneInput; ++j) {
      if (j < count) {
        add_moments<T>(packed[j], shift, sums[0], sums[1]);
      }
    }
  });
  allow_next_launch();
  double totals[2];
  if (grid_sums<2>(sums, grid, call.scratch, totals)) {
    if (static_cast<int>(threadIdx.x) < 8 * grid.slice) {
      const int channel = static_cast<int>(blockIdx.y) * 8 * grid.slice + threadIdx.x;
      const ChannelStatistics statistics(
          grid.rows, call.eps, shift_rows.load<T>(call.x, grid, channel), totals[0], totals[1]);
      if (call.moments != nullptr) {
        statistics.write_moments(call.moments, channel, 8 * grid.vectors, grid.rows);
      } else {
        statistics.write(call, channel, grid.rows);
      }
    }
  }
}

template <typename T, Form kForm, Activation kActivation = Activation::Relu>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) apply_kernel(ApplyCall call) {
  constexpr int kRows = kForm == Form::Plain ? kOneInput : kMoreInputs;
  const BatchNormGrid& grid = call.grid;
  const Lane lane(grid);
  const auto* x = static_cast<const Vector*>(call.x);
  const auto* addend = static_cast<const Vector*>(call.addend);
  auto* y = static_cast<Vector*>(call.y);
  wait_for_previous_launch();
  ScaleShift bn(call.bn, lane.vector), bn2;
  if constexpr (kForm == Form::TwoNorms) {
    bn2 = ScaleShift(call.bn2, lane.vector);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bn.shift[i] += bn2.shift[i];
    }
  }
  for_each_row<kRows, From::Start>(grid, lane, [&](int at, int distance, int count) {
    Vector packed[kRows], added[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j < count) {
        packed[j] = x[at + j * distance];
        if constexpr (kForm != Form::Plain) {
          added[j] = addend[at + j * distance];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j < count) {
        float values[8];
        const unsigned passed =
            normalise<T, kForm, kActivation>(packed[j], added[j], bn, bn2, values);
        y[at + j * distance] = pack<T>(values);
        if (kActivation == Activation::Relu && call.mask != nullptr) {
          call.mask[at + j * distance] = static_cast<uint8_t>(passed);
        }
      }
    }
  });
}

template <typename T>
cudaError_t apply(const ApplyCall& call, dim3 blocks, cudaStream_t stream) {
  auto* kernel = apply_kernel<T, Form::Plain>;
  if (call.activation != Activation::Relu) {
    kernel = call.activation == Activation::Silu ? apply_kernel<T, Form::Plain, Activation::Silu>
                                                 : apply_kernel<T, Form::Plain, Activation::None>;
  } else if (call.addend != nullptr) {
    kernel = call.second ? apply_kernel<T, Form::TwoNorms> : apply_kernel<T, Form::Residual>;
  }
  return launch_after(kernel, call, blocks, call.follows_sums, stream);
}

BatchNormGrid make_grid(int64_t rows, int64_t channels, int num_sms, int max_slice) {
  BatchNormGrid grid;
  grid.rows = rows;
  grid.vectors = static_cast<int>(channels / 8);
  grid.slice = 1;
  while (grid.slice < max_slice && grid.vectors % (2 * grid.slice) == 0) {
    grid.slice *= 2;
  }
  const int rows_of_block = kThreads / grid.slice;
  const int64_t useful = (rows + rows_of_block - 1) / rows_of_block;
  grid.slices = grid.vectors / grid.slice;
  const int64_t resident = std::max(1, num_sms * kBlocksPerSm / grid.slices);
  grid.blocks = static_cast<int>(std::min(useful, resident));
  return grid;
}

// All kernels are compiled for the same architectures.
bool ask_for_hopper_code() {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, apply_kernel<__nv_bfloat16, Form::Plain>) != cudaSuccess) {
    cudaGetLastError();  // must not reach the next launch's check
    return false;
  }
  return attributes.ptxVersion >= 90;
}

}  // namespace

bool runs_hopper_code(int device) {
  static std::mutex mutex;
  static std::map<int, bool> known;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = known.try_emplace(device, false);
  if (is_new) {
    place->second = ask_for_hopper_code();
  }
  return place->second;
}

BatchNormGrid sums_grid(int64_t rows, int64_t channels, int num_sms) {
  return make_grid(rows, channels, num_sms, kSumsSlice);
}

BatchNormGrid map_grid(int64_t rows, int64_t channels, int num_sms) {
  return make_grid(rows, channels, num_sms, kMapSlice);
}

cudaError_t launch_statistics(const StatisticsCall& call, Half dtype, cudaStream_t stream) {
  const dim3 blocks(call.grid.blocks, call.grid.slices);
  if (dtype == Half::Bfloat16) {
    statistics_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    statistics_kernel<__half><<<blocks, kThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

cudaError_t launch_apply(const ApplyCall& call, Half dtype, cudaStream_t stream) {
  const dim3 blocks(call.grid.blocks, call.grid.slices);
  return dtype == Half::Bfloat16 ? apply<__nv_bfloat16>(call, blocks, stream)
                                 : apply<__half>(call, blocks, stream);
}

}  // namespace ddp::ops::detail
