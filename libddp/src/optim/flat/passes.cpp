// SPDX-License-Identifier: Apache-2.0
#include "optim/flat/passes.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "ddp/detail/check.hpp"
#include "optim/flat/kernels.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ddp::detail {
namespace {

float read(const void* data, FlatDtype dtype, int64_t i) {
  switch (dtype) {
    case FlatDtype::BFloat16:
      return static_cast<const c10::BFloat16*>(data)[i];
    case FlatDtype::Float16:
      return static_cast<const c10::Half*>(data)[i];
    default:
      return static_cast<const float*>(data)[i];
  }
}

void write(void* data, FlatDtype dtype, int64_t i, float value) {
  if (dtype == FlatDtype::BFloat16) {
    static_cast<c10::BFloat16*>(data)[i] = value;
  } else {
    static_cast<c10::Half*>(data)[i] = value;
  }
}

float round_to(FlatDtype dtype, float value) {
  return dtype == FlatDtype::BFloat16 ? static_cast<float>(c10::BFloat16(value))
                                      : static_cast<float>(c10::Half(value));
}

float read_weight(const FlatSegment& segment, int64_t i) {
  const float weight = segment.weight[i];
  return segment.leaf == nullptr ? weight
                                 : flat_master(weight, round_to(segment.leaf_dtype, weight),
                                               read(segment.leaf, segment.leaf_dtype, i));
}

// Calls body(gradient, weight, slots) for every element and stores its results.
template <typename Rule, bool WritesWeight, bool WritesSlots, typename Body>
void for_each_element(const FlatSegment& segment, const void* gradient, FlatDtype dtype,
                      Body body) {
  for (int64_t i = 0; i < segment.numel; ++i) {
    float weight = read_weight(segment, i);
    float slots[kFlatMaxSlots] = {};
    for (int slot = 0; slot < Rule::kSlots; ++slot) {
      slots[slot] = segment.slots[slot][i];
    }
    body(read(gradient, dtype, i), weight, slots);
    for (int slot = 0; WritesSlots && slot < Rule::kSlots; ++slot) {
      segment.slots[slot][i] = slots[slot];
    }
    if (WritesWeight) {
      segment.weight[i] = weight;
      if (segment.leaf != nullptr) {
        write(segment.leaf, segment.leaf_dtype, i, weight);
      }
    }
  }
}

template <typename Rule>
void update_segment(const FlatStep& step, int32_t index, const void* gradient, FlatDtype dtype) {
  const FlatSegment& segment = step.segments[index];
  if constexpr (Rule::kMeasures) {
    const FlatFactors factors = flat_factors(step, segment, index);
    double weights = 0.0;
    double updates = 0.0;
    for_each_element<Rule, false, Rule::kMeasureWritesSlots>(
        segment, gradient, dtype, [&](float grad, float weight, float* slots) {
          const double update = Rule::measure(step.rule, factors, grad, weight, slots);
          weights += static_cast<double>(weight) * weight;
          updates += update * update;
        });
    flat_trust(step, index, weights, updates);
  }
  const FlatFactors factors = flat_factors(step, segment, index);
  for_each_element<Rule, true, Rule::kApplyWritesSlots>(
      segment, gradient, dtype, [&](float grad, float& weight, float* slots) {
        Rule::apply(step.rule, factors, grad, weight, slots);
      });
}

void host_update(const FlatStep& step, const FlatGradients& gradients) {
  if (step.found_inf.get() != 0.0F) {
    return;
  }
  for (int32_t i = 0; i < gradients.num_segments; ++i) {
    if (gradients.data[i] == nullptr) {
      continue;
    }
    const int32_t index = gradients.first_segment + i;
    if (step.rule.counts()) {
      flat_count(step, index);
    }
    with_flat_rule(step.rule, [&](auto rule) {
      update_segment<decltype(rule)>(step, index, gradients.data[i], gradients.dtype[i]);
    });
  }
}

void host_scan(const FlatScan& scan, const FlatGradients& gradients) {
  for (int32_t c = gradients.first_chunk; c < gradients.first_chunk + gradients.num_chunks; ++c) {
    const FlatChunk chunk = scan.chunks[c];
    const int32_t local = chunk.segment - gradients.first_segment;
    const void* const data = gradients.data[local];
    const int64_t begin = static_cast<int64_t>(chunk.index) * kFlatChunk;
    const int64_t end =
        data == nullptr ? begin : std::min(begin + kFlatChunk, scan.segments[chunk.segment].numel);
    double sum = 0.0;
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) {
      const float gradient = read(data, gradients.dtype[local], i);
      finite = finite && flat_is_finite(gradient);
      const double scaled = gradient * scan.inverse_scale.get();
      sum += scaled * scaled;
    }
    scan.sums[c] = sum;
    scan.bad[c] = finite ? 0 : 1;
  }
}

void host_scan_end(const FlatScan& scan) {
  double square = 0.0;
  int32_t first_bad = -1;
  for (int32_t c = 0; c < scan.num_chunks; ++c) {
    square += scan.sums[c];
    if (first_bad < 0 && scan.bad[c] != 0) {
      first_bad = scan.chunks[c].segment;
    }
  }
  flat_conclude(scan, square, first_bad);
}

// Runs `host`, or `launch(stream)` on the device's current stream.
template <typename Host, typename Launch>
void run_on(c10::Device device, Host host, [[maybe_unused]] Launch launch) {
  if (device.is_cpu()) {
    host();
    return;
  }
#ifdef DDP_HAS_CUDA
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(launch(c10::cuda::getCurrentCUDAStream(device.index()).stream()));
#else
  DDP_CHECK(false, "this build has no CUDA parts");
#endif
}

}  // namespace

void flat_update(const FlatStep& step, const FlatGradients& gradients, c10::Device device) {
  run_on(
      device, [&] { host_update(step, gradients); },
      [&](auto stream) { return launch_flat_update(step, gradients, stream); });
}

void flat_scan(const FlatScan& scan, const FlatGradients& gradients, c10::Device device) {
  if (gradients.num_chunks == 0) {
    return;
  }
  run_on(
      device, [&] { host_scan(scan, gradients); },
      [&](auto stream) { return launch_flat_scan(scan, gradients, stream); });
}

void flat_scan_end(const FlatScan& scan, c10::Device device) {
  run_on(
      device, [&] { host_scan_end(scan); },
      [&](auto stream) { return launch_flat_scan_end(scan, stream); });
}

void flat_average(const FlatAverage* averages, const FlatChunk* chunks, int num_chunks, float share,
                  c10::Device device) {
  run_on(
      device, [] { DDP_CHECK(false, "averages on the CPU are ATen's"); },
      [&](auto stream) {
        return launch_flat_average(averages, chunks, num_chunks, share, stream);
      });
}

}  // namespace ddp::detail
