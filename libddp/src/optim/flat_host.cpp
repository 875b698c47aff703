// SPDX-License-Identifier: Apache-2.0
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "optim/flat_kernels.hpp"

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

template <typename Rule>
void update_segment(const FlatStep& step, const FlatSegment& segment, const FlatFactors& factors,
                    const void* gradient, FlatDtype dtype) {
  for (int64_t i = 0; i < segment.numel; ++i) {
    float weight = segment.weight[i];
    float slots[kFlatMaxSlots] = {};
    for (int slot = 0; slot < Rule::kSlots; ++slot) {
      slots[slot] = segment.slots[slot][i];
    }
    Rule::apply(step.rule, factors, read(gradient, dtype, i), weight, slots);
    segment.weight[i] = weight;
    for (int slot = 0; slot < Rule::kSlots; ++slot) {
      segment.slots[slot][i] = slots[slot];
    }
    if (segment.leaf != nullptr) {
      write(segment.leaf, segment.leaf_dtype, i, weight);
    }
  }
}

}  // namespace

void host_flat_update(const FlatStep& step, const FlatGradients& gradients) {
  if (step.found_inf.get() != 0.0F) {
    return;
  }
  for (int32_t i = 0; i < gradients.num_segments; ++i) {
    if (gradients.data[i] == nullptr) {
      continue;
    }
    const int32_t index = gradients.first_segment + i;
    if (step.counts != nullptr) {
      flat_count(step, index);
    }
    const FlatSegment& segment = step.segments[index];
    const FlatFactors factors = flat_factors(step, segment, index);
    with_flat_rule(step.rule, [&](auto rule) {
      update_segment<decltype(rule)>(step, segment, factors, gradients.data[i], gradients.dtype[i]);
    });
  }
}

}  // namespace ddp::detail
