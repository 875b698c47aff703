// SPDX-License-Identifier: Apache-2.0
// Combines the moments and sums of all processes, one thread per channel.
#include "ops/vision/batch_norm_device.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kMergeThreads = 128;

__global__ void merge_kernel(MergeCall call) {
  const int channel = static_cast<int>(blockIdx.x) * kMergeThreads + static_cast<int>(threadIdx.x);
  if (channel >= call.channels) {
    return;
  }
  const float* counts = call.moments + 2 * call.channels;
  double total = 0, sum = 0;
  for (int process = 0; process < call.processes; ++process) {
    const double count = counts[process * call.stride];
    total += count;
    sum += count * call.moments[process * call.stride + channel];
  }
  const double share = 1 / (total < 1 ? 1 : total), mean = sum * share;
  double squares = 0;
  for (int process = 0; process < call.processes; ++process) {
    const float* moments = call.moments + process * call.stride + channel;
    const double apart = moments[0] - mean;
    squares += (moments[call.channels] + apart * apart) * counts[process * call.stride];
  }
  const double variance = squares * share;
  call.mean[channel] = static_cast<float>(mean);
  call.invstd[channel] = static_cast<float>(1 / sqrt(variance + call.eps));
  const double unbiased = variance * (total > 1 ? total / (total - 1) : 1);
  float& running_mean = call.running_mean[channel];
  float& running_var = call.running_var[channel];
  const float momentum = total > 0 ? call.momentum : 0;
  running_mean += momentum * (static_cast<float>(mean) - running_mean);
  running_var += momentum * (static_cast<float>(unbiased) - running_var);
  if (channel == 0) {
    *call.count = static_cast<float>(total);
  }
}

__global__ void coefficients_kernel(SharedSumsCall call) {
  const int channel = static_cast<int>(blockIdx.x) * kMergeThreads + static_cast<int>(threadIdx.x);
  if (channel >= call.channels) {
    return;
  }
  const ChannelSaved saved(call.target, channel);
  const double sum = call.sum[channel], product = call.product[channel];
  const ChannelBackward all(saved, *call.count, sum, product);
  all.write_coefficients(call.target, channel, call.channels);
}

unsigned blocks_for(int channels) {
  return static_cast<unsigned>((channels + kMergeThreads - 1) / kMergeThreads);
}

}  // namespace

cudaError_t launch_merge_statistics(const MergeCall& call, cudaStream_t stream) {
  merge_kernel<<<blocks_for(call.channels), kMergeThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t launch_shared_coefficients(const SharedSumsCall& call, cudaStream_t stream) {
  coefficients_kernel<<<blocks_for(call.channels), kMergeThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace ddp::ops::detail
