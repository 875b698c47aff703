// SPDX-License-Identifier: Apache-2.0
// A whole forward or backward in one kernel, for activations that fit in the GPU's registers. Rows
// are read once, summed, and used again when all blocks know the sums.
#include <algorithm>

#include "ops/vision/batch_norm_device.cuh"

namespace ddp::ops::detail {
namespace {

// Slices are narrower than in the large kernels: every block reads partials here, and more slices
// share this work.
constexpr int kSmallSlice = 4;
constexpr int kSmallChannels = 8 * kSmallSlice;

/// Visits the rows that a thread keeps: visit(j, index of the vector).
template <int kRows, typename Visit>
__device__ void for_kept_rows(const BatchNormGrid& grid, const Lane& lane, const Visit& visit) {
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = lane.row + j * lane.step;
    if (row < static_cast<int>(grid.rows)) {
      visit(j, row * grid.vectors + lane.vector);
    }
  }
}

/// Eight adjacent values of shared memory.
__device__ void take8(const float* values, float (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    out[i] = values[i];
  }
}

/// A thread's place in the block and the channel that it finishes. Only the first threads of a
/// block finish a channel.
struct Finisher {
  int place, channel;
  bool finishes;

  __device__ explicit Finisher(const BatchNormGrid& grid)
      : place(static_cast<int>(threadIdx.x)),
        channel((static_cast<int>(blockIdx.y) * 8 * grid.slice + place) % (8 * grid.vectors)),
        finishes(place < 8 * grid.slice) {}
  /// The first of the thread's own eight channels, within the slice.
  __device__ int first(const BatchNormGrid& grid) const { return 8 * (place & (grid.slice - 1)); }
};

/// The sums over all blocks of a slice, available in each of these blocks.
template <int kSums>
__device__ __forceinline__ void sums_of_slice(const float (&sums)[kSums][8], const SmallGrid& small,
                                              const ReductionScratch& scratch,
                                              const SliceBarrier& barrier,
                                              double (&totals)[kSums]) {
  if (small.cluster) {
    cluster_sums<kSums>(sums, small.grid, totals);
  } else {
    grid_sums_everywhere<kSums>(sums, small.grid, scratch, barrier, totals);
  }
}

/// The rows that a thread of a forward keeps.
template <typename T, Form kForm, int kRows>
struct ForwardRows {
  Vector packed[kRows], added[kRows];

  __device__ __forceinline__ ForwardRows(const BatchNormGrid& grid, const Lane& lane,
                                         const ApplyCall& apply) {
    for_kept_rows<kRows>(grid, lane, [&](int j, int at) {
      packed[j] = static_cast<const Vector*>(apply.x)[at];
      if constexpr (kForm != Form::Plain) {
        added[j] = static_cast<const Vector*>(apply.addend)[at];
      }
    });
  }
  template <int kSums>
  __device__ __forceinline__ void add_up(const BatchNormGrid& grid, const Lane& lane,
                                         const ApplyCall& apply, float (&sums)[kSums][8]) const {
    float shift[8], shift2[8];
    const ShiftRows shift_rows(grid.rows);
    shift_rows.load<T>(static_cast<const Vector*>(apply.x), grid, lane.vector, shift);
    if constexpr (kForm == Form::TwoNorms) {
      shift_rows.load<T>(static_cast<const Vector*>(apply.addend), grid, lane.vector, shift2);
    }
    for_kept_rows<kRows>(grid, lane, [&](int j, int) {
      add_moments<T>(packed[j], shift, sums[0], sums[1]);
      if constexpr (kForm == Form::TwoNorms) {
        add_moments<T>(added[j], shift2, sums[2], sums[3]);
      }
    });
  }
  __device__ __forceinline__ void write(const BatchNormGrid& grid, const Lane& lane,
                                        const ApplyCall& apply, const ScaleShift& bn,
                                        const ScaleShift& bn2) const {
    for_kept_rows<kRows>(grid, lane, [&](int j, int at) {
      float values[8];
      const unsigned passed = normalise<T, kForm>(packed[j], added[j], bn, bn2, values);
      static_cast<Vector*>(apply.y)[at] = pack<T>(values);
      if (apply.mask != nullptr) {
        apply.mask[at] = static_cast<uint8_t>(passed);
      }
    });
  }
};

template <typename T, Form kForm, int kRows>
__global__ void __launch_bounds__(kThreads, 1) small_forward_kernel(SmallForwardCall call) {
  constexpr bool kTwo = kForm == Form::TwoNorms;
  constexpr int kSums = kTwo ? 4 : 2;
  const BatchNormGrid& grid = call.small.grid;
  const ApplyCall& apply = call.apply;
  const Lane lane(grid);
  const ForwardRows<T, kForm, kRows> rows(grid, lane, apply);
  const SliceBarrier barrier(call.first.scratch);
  const Finisher own(grid);
  const auto before = ChannelInputs::load<T>(apply.x, grid, apply.bn, own.channel);
  ChannelInputs before2{};
  if constexpr (kTwo) {
    before2 = ChannelInputs::load<T>(apply.addend, grid, apply.bn2, own.channel);
  }
  float sums[kSums][8] = {};
  rows.add_up(grid, lane, apply, sums);
  double totals[kSums] = {};
  sums_of_slice(sums, call.small, call.first.scratch, barrier, totals);

  __shared__ float scales[kSmallChannels], shifts[kSmallChannels], scales2[kSmallChannels];
  const ChannelStatistics statistics(grid.rows, call.first.eps, before.shift, totals[0], totals[1]);
  if (own.finishes) {
    const float scale = statistics.invstd * before.weight;
    scales[own.place] = scale;
    shifts[own.place] = before.bias - statistics.mean * scale;
    if constexpr (kTwo) {
      const ChannelStatistics other(grid.rows, call.second.eps, before2.shift, totals[2],
                                    totals[3]);
      scales2[own.place] = other.invstd * before2.weight;
      shifts[own.place] += before2.bias - other.mean * scales2[own.place];
      if (blockIdx.x == 0) {
        other.write(call.second, own.channel, grid.rows);
      }
    }
  }
  __syncthreads();
  ScaleShift bn, bn2;
  take8(scales + own.first(grid), bn.scale);
  take8(shifts + own.first(grid), bn.shift);
  if constexpr (kTwo) {
    take8(scales2 + own.first(grid), bn2.scale);
  }
  rows.write(grid, lane, apply, bn, bn2);
  if (own.finishes && blockIdx.x == 0) {
    statistics.write(call.first, own.channel, grid.rows);
  }
  if (call.small.cluster) {
    leave_cluster();
  }
}

/// Coefficients of a slice's channels, and the part that a thread needs.
struct SliceCoefficients {
  float a[kSmallChannels], b[kSmallChannels], c[kSmallChannels];

  __device__ void set(int place, const ChannelBackward& from) {
    a[place] = from.a, b[place] = from.b, c[place] = from.c;
  }
  __device__ Coefficients of(int first) const {
    Coefficients taken;
    take8(a + first, taken.a);
    take8(b + first, taken.b);
    take8(c + first, taken.c);
    return taken;
  }
};

/// The rows that a thread of a backward keeps.
template <typename T, bool kTwoGrads, bool kTwoNorms, int kRows>
struct BackwardRows {
  Vector d[kRows], inputs[kRows], inputs2[kRows], grads2[kRows];
  unsigned passed[kRows];

  __device__ __forceinline__ BackwardRows(const BatchNormGrid& grid, const Lane& lane,
                                          const BackwardReduceCall& reduce) {
    for_kept_rows<kRows>(grid, lane, [&](int j, int at) {
      d[j] = static_cast<const Vector*>(reduce.grad)[at];
      inputs[j] = static_cast<const Vector*>(reduce.first.x)[at];
      passed[j] = reduce.mask[at];
      if constexpr (kTwoGrads) {
        grads2[j] = static_cast<const Vector*>(reduce.grad2)[at];
      }
      if constexpr (kTwoNorms) {
        inputs2[j] = static_cast<const Vector*>(reduce.second.x)[at];
      }
    });
  }
  /// Makes d the passed part of both gradients, rounded as in the large kernels.
  template <int kSums>
  __device__ __forceinline__ void add_up(const BatchNormGrid& grid, const Lane& lane,
                                         const BackwardReduceCall& reduce,
                                         float (&sums)[kSums][8]) {
    float mean[8], mean2[8];
    load8(reduce.first.mean, lane.vector, mean);
    if constexpr (kTwoNorms) {
      load8(reduce.second.mean, lane.vector, mean2);
    }
    for_kept_rows<kRows>(grid, lane, [&](int j, int at) {
      float values[8];
      unpack<T>(d[j], values);
      if constexpr (kTwoGrads) {
        add_to<T>(values, grads2[j]);
      }
      keep_passed(passed[j], values);
      d[j] = pack<T>(values);
      if (reduce.sum != nullptr) {
        static_cast<Vector*>(reduce.sum)[at] = d[j];
      }
      unpack<T>(d[j], values);
      add_products<T>(values, inputs[j], mean, sums[1]);
      if constexpr (kTwoNorms) {
        add_products<T>(values, inputs2[j], mean2, sums[2]);
      }
      add_values(values, sums[0]);
    });
  }
  __device__ __forceinline__ void write(const BatchNormGrid& grid, const Lane& lane,
                                        const BackwardReduceCall& reduce, const Coefficients& with,
                                        const Coefficients& with2) const {
    for_kept_rows<kRows>(grid, lane, [&](int j, int at) {
      float values[8];
      unpack<T>(d[j], values);
      write_grad<T>(with, values, inputs[j], static_cast<Vector*>(reduce.first.grad_x) + at);
      if constexpr (kTwoNorms) {
        write_grad<T>(with2, values, inputs2[j], static_cast<Vector*>(reduce.second.grad_x) + at);
      }
    });
  }
};

template <typename T, bool kTwoGrads, bool kTwoNorms, int kRows>
__global__ void __launch_bounds__(kThreads, 1) small_backward_kernel(SmallBackwardCall call) {
  constexpr int kSums = kTwoNorms ? 3 : 2;
  const BackwardReduceCall& reduce = call.reduce;
  const BatchNormGrid& grid = call.small.grid;
  const Lane lane(grid);
  BackwardRows<T, kTwoGrads, kTwoNorms, kRows> rows(grid, lane, reduce);
  const SliceBarrier barrier(reduce.scratch);
  const Finisher own(grid);
  const ChannelSaved saved(reduce.first, own.channel);
  const ChannelSaved saved2(kTwoNorms ? reduce.second : reduce.first, own.channel);
  float sums[kSums][8] = {};
  rows.add_up(grid, lane, reduce, sums);
  double totals[kSums] = {};
  sums_of_slice(sums, call.small, reduce.scratch, barrier, totals);

  __shared__ SliceCoefficients shared[kTwoNorms ? 2 : 1];
  const auto num_rows = static_cast<double>(grid.rows);
  const ChannelBackward result(saved, num_rows, totals[0], totals[1]);
  const ChannelBackward result2(saved2, num_rows, totals[0], totals[kSums - 1]);
  if (own.finishes) {
    shared[0].set(own.place, result);
    if constexpr (kTwoNorms) {
      shared[1].set(own.place, result2);
    }
  }
  __syncthreads();
  const Coefficients with = shared[0].of(own.first(grid));
  Coefficients with2;
  if constexpr (kTwoNorms) {
    with2 = shared[1].of(own.first(grid));
  }
  rows.write(grid, lane, reduce, with, with2);
  if (own.finishes && blockIdx.x == 0) {
    result.write_grads(reduce.first, own.channel);
    if constexpr (kTwoNorms) {
      result2.write_grads(reduce.second, own.channel);
    }
  }
  if (call.small.cluster) {
    leave_cluster();
  }
}

/// Launches one cluster per slice, or a cooperative kernel. Both start only when all blocks that
/// wait for each other have room, also while other such kernels run.
template <typename Call>
cudaError_t launch_together(void (*kernel)(Call), const Call& call, cudaStream_t stream) {
  const BatchNormGrid& grid = call.small.grid;
  cudaLaunchAttribute attribute = {};
  if (call.small.cluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(grid.blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks, grid.slices);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, call);
}

template <typename T, int kRows>
cudaError_t forward(const SmallForwardCall& call, cudaStream_t stream) {
  auto* kernel = small_forward_kernel<T, Form::Plain, kRows>;
  if (call.apply.addend != nullptr) {
    kernel = call.apply.second ? small_forward_kernel<T, Form::TwoNorms, kRows>
                               : small_forward_kernel<T, Form::Residual, kRows>;
  }
  return launch_together(kernel, call, stream);
}

template <typename T, int kRows>
cudaError_t backward(const SmallBackwardCall& call, cudaStream_t stream) {
  const bool two = call.reduce.second_used;
  auto* kernel = two ? small_backward_kernel<T, false, true, kRows>
                     : small_backward_kernel<T, false, false, kRows>;
  if (call.reduce.grad2 != nullptr) {
    kernel = two ? small_backward_kernel<T, true, true, kRows>
                 : small_backward_kernel<T, true, false, kRows>;
  }
  return launch_together(kernel, call, stream);
}

}  // namespace

SmallGrid small_batch_norm_grid(int64_t rows, int64_t channels, int num_sms, int inputs,
                                bool clusters) {
  SmallGrid small;
  BatchNormGrid& grid = small.grid;
  grid.rows = rows;
  grid.vectors = static_cast<int>(channels / 8);
  grid.slice = 1;
  while (grid.slice < kSmallSlice && grid.vectors % (2 * grid.slice) == 0) {
    grid.slice *= 2;
  }
  grid.slices = grid.vectors / grid.slice;
  const int64_t rows_of_block = kThreads / grid.slice;
  const int64_t useful = (rows + rows_of_block - 1) / rows_of_block;
  grid.blocks = static_cast<int>(std::min<int64_t>(useful, num_sms / grid.slices));
  if (grid.blocks == 0) {
    return small;
  }
  constexpr int64_t kClusterBlocks = 8, kClusterRows = 2;
  if (clusters && useful <= kClusterBlocks * kClusterRows) {
    grid.blocks = 1;  // a power of two
    while (grid.blocks < std::min(useful, kClusterBlocks)) {
      grid.blocks *= 2;
    }
    small.cluster = true;
  }
  const int64_t rows_of_thread = (useful + grid.blocks - 1) / grid.blocks;
  const int most = inputs == 1 ? 8 : 4;
  for (int kept = 1; kept <= most && small.rows_of_thread == 0; kept *= 2) {
    small.rows_of_thread = rows_of_thread <= kept ? kept : 0;
  }
  return small;
}

cudaError_t launch_small_forward(const SmallForwardCall& call, Half dtype, cudaStream_t stream) {
  const bool bf16 = dtype == Half::Bfloat16;
  switch (call.small.rows_of_thread) {
    case 1:
      return bf16 ? forward<__nv_bfloat16, 1>(call, stream) : forward<__half, 1>(call, stream);
    case 2:
      return bf16 ? forward<__nv_bfloat16, 2>(call, stream) : forward<__half, 2>(call, stream);
    case 4:
      return bf16 ? forward<__nv_bfloat16, 4>(call, stream) : forward<__half, 4>(call, stream);
    case 8:
      return bf16 ? forward<__nv_bfloat16, 8>(call, stream) : forward<__half, 8>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_small_backward(const SmallBackwardCall& call, Half dtype, cudaStream_t stream) {
  const bool bf16 = dtype == Half::Bfloat16;
  switch (call.small.rows_of_thread) {
    case 1:
      return bf16 ? backward<__nv_bfloat16, 1>(call, stream) : backward<__half, 1>(call, stream);
    case 2:
      return bf16 ? backward<__nv_bfloat16, 2>(call, stream) : backward<__half, 2>(call, stream);
    case 4:
      return bf16 ? backward<__nv_bfloat16, 4>(call, stream) : backward<__half, 4>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ddp::ops::detail
