// SPDX-License-Identifier: Apache-2.0
// The arithmetic of flat optimizers for one element, compiled for the host and for the device, and
// the tables that say where the elements lie. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DDP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DDP_HOST_DEVICE inline
#endif

namespace ddp::detail {

/// A number that the host knows, or a float32 on the device.
struct FlatScalar {
  const float* device = nullptr;
  float host = 1.0F;
  DDP_HOST_DEVICE float get() const { return device != nullptr ? *device : host; }
};

enum class FlatDtype : uint8_t { Float32, BFloat16, Float16 };

constexpr int kFlatMaxSlots = 3;

/// One parameter. What it points to is equally ordered in memory, whatever the strides.
struct FlatSegment {
  float* weight = nullptr;  ///< the float32 leaf itself, or the master of a half leaf
  float* slots[kFlatMaxSlots] = {};
  void* leaf = nullptr;  ///< a half leaf, which gets the rounded weight; nullptr for float32 leaves
  int64_t numel = 0;
  float lr_scale = 1.0F;
  float weight_decay = 0.0F;
  FlatDtype leaf_dtype = FlatDtype::Float32;
  bool aligned = false;  ///< four elements of each may be moved at once
};

/// A piece of a segment, for one block of threads: elements [index, index + 1) * kFlatChunk.
struct FlatChunk {
  int32_t segment = 0;
  int32_t index = 0;
};
constexpr int kFlatThreads = 256;
constexpr int kFlatVectors = 4;  ///< of four elements, that a thread moves
constexpr int kFlatChunk = kFlatThreads * kFlatVectors * 4;

/// Where the gradients of a run of segments lie in this step. Travels as a kernel's argument, which
/// a CUDA graph keeps: no upload, and nothing that a replay could find changed.
constexpr int kFlatMaxGradients = 400;
struct FlatGradients {
  int32_t first_segment = 0;
  int32_t num_segments = 0;
  int32_t first_chunk = 0;
  int32_t num_chunks = 0;
  const void* data[kFlatMaxGradients] = {};  ///< nullptr: no gradient, nothing is updated
  FlatDtype dtype[kFlatMaxGradients] = {};
  bool aligned[kFlatMaxGradients] = {};
};

enum class FlatRuleType : uint8_t { Sgd, Adam };

struct FlatRule {
  FlatRuleType type = FlatRuleType::Sgd;
  int num_slots = 0;
  bool nesterov = false;
  bool decoupled =
      false;  ///< weight decay shrinks the weight (AdamW) and is not added to gradients
  float momentum = 0.0F;
  double beta1 = 0.0;
  double beta2 = 0.0;
  float eps = 0.0F;
};

/// What the step's number makes of Adam's means (PyTorch's bias_correction1 and the root of
/// bias_correction2).
struct FlatBias {
  float correction1 = 1.0F;
  float correction2_sqrt = 1.0F;
};

/// One step; pointers lie on the parameters' device.
struct FlatStep {
  const FlatSegment* segments = nullptr;
  const FlatChunk* chunks = nullptr;
  float* counts = nullptr;     ///< [segments] updates made; Adam
  FlatBias* biases = nullptr;  ///< [segments] of this step; Adam
  FlatRule rule;
  FlatScalar lr;
  FlatScalar inverse_scale;
  FlatScalar clip_factor;
  FlatScalar found_inf;  ///< not 0: nothing changes
};

/// The numbers that one update needs beside the element's own.
struct FlatFactors {
  float gradient;  ///< gradients are multiplied by it
  float lr;
  float weight_decay;
  float momentum;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  FlatBias bias;
};

DDP_HOST_DEVICE FlatFactors flat_factors(const FlatStep& step, const FlatSegment& segment,
                                         int32_t index) {
  const FlatRule& rule = step.rule;
  return {.gradient = step.inverse_scale.get() * step.clip_factor.get(),
          .lr = step.lr.get() * segment.lr_scale,
          .weight_decay = segment.weight_decay,
          .momentum = rule.momentum,
          .beta1 = static_cast<float>(rule.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - rule.beta1),
          .beta2 = static_cast<float>(rule.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - rule.beta2),
          .eps = rule.eps,
          .bias = step.biases != nullptr ? step.biases[index] : FlatBias{}};
}

/// Counts the update of segment `index` and says what that makes of its means.
DDP_HOST_DEVICE void flat_count(const FlatStep& step, int32_t index) {
  const float count = step.counts[index] + 1.0F;
  step.counts[index] = count;
  step.biases[index] = {
      static_cast<float>(1.0 - pow(step.rule.beta1, static_cast<double>(count))),
      static_cast<float>(sqrt(1.0 - pow(step.rule.beta2, static_cast<double>(count))))};
}

/// torch.optim.SGD with dampening 0; NumSlots 1 with momentum, else 0.
template <int NumSlots>
struct FlatSgd {
  static constexpr int kSlots = NumSlots;
  static DDP_HOST_DEVICE void apply(const FlatRule& rule, const FlatFactors& f, float gradient,
                                    float& weight, float* slots) {
    gradient = gradient * f.gradient + f.weight_decay * weight;
    if constexpr (NumSlots == 1) {
      slots[0] = f.momentum * slots[0] + gradient;
      gradient = rule.nesterov ? gradient + f.momentum * slots[0] : slots[0];
    }
    weight -= f.lr * gradient;
  }
};

/// torch.optim.Adam and AdamW; NumSlots 3 with amsgrad, else 2.
template <int NumSlots>
struct FlatAdam {
  static constexpr int kSlots = NumSlots;
  static DDP_HOST_DEVICE void apply(const FlatRule& rule, const FlatFactors& f, float gradient,
                                    float& weight, float* slots) {
    gradient *= f.gradient;
    if (rule.decoupled) {
      weight -= f.lr * f.weight_decay * weight;
    } else {
      gradient += f.weight_decay * weight;
    }
    slots[0] = f.beta1 * slots[0] + f.one_minus_beta1 * gradient;
    slots[1] = f.beta2 * slots[1] + f.one_minus_beta2 * gradient * gradient;
    float square = slots[1];
    if constexpr (NumSlots == 3) {
      // Not fmax: a NaN must stay, as in PyTorch.
      square = slots[2] > square ? slots[2] : square;
      slots[2] = square;
    }
    const float denominator = sqrtf(square) / f.bias.correction2_sqrt + f.eps;
    weight -= f.lr / f.bias.correction1 * slots[0] / denominator;
  }
};

/// Calls `body` with the rule's arithmetic as a type.
template <typename Body>
void with_flat_rule(const FlatRule& rule, Body body) {
  if (rule.type == FlatRuleType::Sgd) {
    rule.num_slots == 0 ? body(FlatSgd<0>()) : body(FlatSgd<1>());
  } else {
    rule.num_slots == 2 ? body(FlatAdam<2>()) : body(FlatAdam<3>());
  }
}

}  // namespace ddp::detail
