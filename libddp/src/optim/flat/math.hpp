// SPDX-License-Identifier: Apache-2.0
// The arithmetic of flat optimizers for one element, compiled for host and device, and the tables
// that locate the elements. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DDP_HOST_DEVICE_INLINE __host__ __device__ __forceinline__
#else
#define DDP_HOST_DEVICE_INLINE inline
#endif

namespace ddp::detail {

/// A number known on the host, or a float32 on the device.
struct FlatScalar {
  const float* device = nullptr;
  float host = 1.0F;
  DDP_HOST_DEVICE_INLINE float get() const { return device != nullptr ? *device : host; }
};

enum class FlatDtype : uint8_t { Float32, BFloat16, Float16 };

constexpr int kFlatMaxSlots = 3;  ///< of any rule below

/// One parameter. All its tensors have the same memory order, for any strides.
struct FlatSegment {
  float* weight = nullptr;  ///< the float32 leaf itself, or the master of a half leaf (flat_master)
  float* slots[kFlatMaxSlots] = {};
  void* leaf = nullptr;  ///< a half leaf, which gets the rounded weight; nullptr for float32 leaves
  int64_t numel = 0;
  float lr_scale = 1.0F;
  float weight_decay = 0.0F;
  int32_t first_chunk = 0;
  FlatDtype leaf_dtype = FlatDtype::Float32;
  bool aligned = false;  ///< four elements of each tensor can be moved at once
  bool adapts = true;    ///< LARS, LAMB: has a trust ratio
};

/// A piece of a segment, for one thread block: elements [index, index + 1) * kFlatChunk.
struct FlatChunk {
  int32_t segment = 0;
  int32_t index = 0;
};
constexpr int kFlatThreads = 256;
constexpr int kFlatVectors = 2;  ///< vectors of four elements per thread
constexpr int kFlatChunk = kFlatThreads * kFlatVectors * 4;

/// Addresses of the gradients of a run of segments in this step. A kernel argument, which a CUDA
/// graph stores: no upload, and a replay cannot find it changed.
constexpr int kFlatMaxGradients = 400;
struct FlatGradients {
  int32_t first_segment = 0;
  int32_t num_segments = 0;
  int32_t first_chunk = 0;
  int32_t num_chunks = 0;
  const void* data[kFlatMaxGradients] = {};  ///< nullptr: no gradient, no update
  FlatDtype dtype[kFlatMaxGradients] = {};
  bool aligned[kFlatMaxGradients] = {};
};

/// What an update starts from: the master while it rounds to the leaf, else the leaf, which other
/// code wrote. `rounded` is the master in the leaf's dtype. A NaN is the leaf's.
DDP_HOST_DEVICE_INLINE float flat_master(float master, float rounded, float leaf) {
  return rounded == leaf ? master : leaf;
}

enum class FlatRuleType : uint8_t { Sgd, Adam, Lars, Lamb };

struct FlatRule {
  FlatRuleType type = FlatRuleType::Sgd;
  bool has_momentum = false;  ///< Sgd
  bool amsgrad = false;       ///< Adam
  bool nesterov = false;
  bool decoupled = false;  ///< AdamW: weight decay shrinks the weight and is not added to gradients
  float momentum = 0.0F;
  double beta1 = 0.0;
  double beta2 = 0.0;
  float eps = 0.0F;
  float trust_coefficient = 0.0F;

  DDP_HOST_DEVICE_INLINE bool counts() const {
    return type == FlatRuleType::Adam || type == FlatRuleType::Lamb;
  }
  DDP_HOST_DEVICE_INLINE bool measures() const {
    return type == FlatRuleType::Lars || type == FlatRuleType::Lamb;
  }
};

/// Values of a segment in a step: Adam's corrections for the number of updates (PyTorch's
/// bias_correction1 and the root of bias_correction2), and the trust ratio.
struct FlatBias {
  float correction1 = 1.0F;
  float correction2_sqrt = 1.0F;
  float trust_ratio = 1.0F;
};

/// Sums of squares over a chunk's elements, in float64 because float32 may overflow.
struct FlatSquares {
  double weight = 0.0;
  double update = 0.0;  ///< LARS: of the gradient; LAMB: of the update before the trust ratio
};

/// One step; pointers are on the parameters' device.
struct FlatStep {
  const FlatSegment* segments = nullptr;
  const FlatChunk* chunks = nullptr;
  float* counts = nullptr;         ///< [segments] updates made; Adam, LAMB
  FlatBias* biases = nullptr;      ///< [segments] of this step; Adam, LARS, LAMB
  FlatSquares* squares = nullptr;  ///< [chunks] of this step; LARS, LAMB
  FlatRule rule;
  FlatScalar lr;
  FlatScalar inverse_scale;
  FlatScalar clip_factor;
  FlatScalar found_inf;  ///< not 0: skip the step
};

/// The numbers of one update, besides the element's own.
struct FlatFactors {
  float gradient;  ///< multiplied into gradients
  float lr;
  float weight_decay;
  float momentum;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  float mean_scale;    // 1 / correction1
  float square_scale;  // 1 / correction2_sqrt
  float trust_ratio;
};

DDP_HOST_DEVICE_INLINE FlatFactors flat_factors(const FlatStep& step, const FlatSegment& segment,
                                                int32_t index) {
  const FlatRule& rule = step.rule;
  const FlatBias bias = rule.counts() || rule.measures() ? step.biases[index] : FlatBias{};
  return {.gradient = step.inverse_scale.get() * step.clip_factor.get(),
          .lr = step.lr.get() * segment.lr_scale,
          .weight_decay = segment.weight_decay,
          .momentum = rule.momentum,
          .beta1 = static_cast<float>(rule.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - rule.beta1),
          .beta2 = static_cast<float>(rule.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - rule.beta2),
          .eps = rule.eps,
          .mean_scale = rule.counts() ? 1.0F / bias.correction1 : 1.0F,
          .square_scale = rule.counts() ? 1.0F / bias.correction2_sqrt : 1.0F,
          .trust_ratio = bias.trust_ratio};
}

/// Counts the update of segment `index` and updates its corrections.
DDP_HOST_DEVICE_INLINE void flat_count(const FlatStep& step, int32_t index) {
  const float count = step.counts[index] + 1.0F;
  step.counts[index] = count;
  step.biases[index] = {
      static_cast<float>(1.0 - pow(step.rule.beta1, static_cast<double>(count))),
      static_cast<float>(sqrt(1.0 - pow(step.rule.beta2, static_cast<double>(count)))), 1.0F};
}

/// Sets the trust ratio from the sums of squares over the whole segment `index`.
DDP_HOST_DEVICE_INLINE void flat_trust(const FlatStep& step, int32_t index, double weight_square,
                                       double update_square) {
  const FlatSegment& segment = step.segments[index];
  const auto weight = static_cast<float>(sqrt(weight_square));
  const auto update = static_cast<float>(sqrt(update_square));
  float ratio = 1.0F;
  if (segment.adapts && weight > 0.0F && update > 0.0F) {
    ratio = step.rule.type == FlatRuleType::Lars
                ? step.rule.trust_coefficient * weight /
                      (update + segment.weight_decay * weight + step.rule.eps)
                : weight / update;
  }
  step.biases[index].trust_ratio = ratio;
}

// Every rule has `apply` for one element. Rules with a trust ratio also have `measure`, which runs
// over all elements first. It may change slots and returns the element whose norm is the ratio's
// denominator.
struct FlatRuleBase {
  static constexpr bool kMeasures = false;
  static constexpr bool kMeasureWritesSlots = false;
  static constexpr bool kApplyReadsGradient = true;
  static constexpr bool kApplyWritesSlots = true;
};

/// torch.optim.SGD with dampening 0.
template <bool HasMomentum>
struct FlatSgd : FlatRuleBase {
  static constexpr int kSlots = HasMomentum ? 1 : 0;
  static DDP_HOST_DEVICE_INLINE void apply(const FlatRule& rule, const FlatFactors& f,
                                           float gradient, float& weight, float* slots) {
    gradient = gradient * f.gradient + f.weight_decay * weight;
    if constexpr (HasMomentum) {
      slots[0] = f.momentum * slots[0] + gradient;
      gradient = rule.nesterov ? gradient + f.momentum * slots[0] : slots[0];
    }
    weight -= f.lr * gradient;
  }
};

/// torch.optim.Adam and AdamW.
template <bool Amsgrad>
struct FlatAdam : FlatRuleBase {
  static constexpr int kSlots = Amsgrad ? 3 : 2;
  static DDP_HOST_DEVICE_INLINE void apply(const FlatRule& rule, const FlatFactors& f,
                                           float gradient, float& weight, float* slots) {
    gradient *= f.gradient;
    if (rule.decoupled) {
      weight -= f.lr * f.weight_decay * weight;
    } else {
      gradient += f.weight_decay * weight;
    }
    slots[0] = f.beta1 * slots[0] + f.one_minus_beta1 * gradient;
    slots[1] = f.beta2 * slots[1] + f.one_minus_beta2 * gradient * gradient;
    float square = slots[1];
    if constexpr (Amsgrad) {
      // Not fmax: a NaN must stay, as in PyTorch.
      square = slots[2] > square ? slots[2] : square;
      slots[2] = square;
    }
    const float denominator = sqrtf(square) * f.square_scale + f.eps;
    weight -= f.lr * f.mean_scale * slots[0] / denominator;
  }
};

/// LARS as documented at OptimizerOptions.
struct FlatLars : FlatRuleBase {
  static constexpr int kSlots = 1;
  static constexpr bool kMeasures = true;
  static DDP_HOST_DEVICE_INLINE float measure(const FlatRule& /*rule*/, const FlatFactors& f,
                                              float gradient, float /*weight*/, float* /*slots*/) {
    return gradient * f.gradient;
  }
  static DDP_HOST_DEVICE_INLINE void apply(const FlatRule& /*rule*/, const FlatFactors& f,
                                           float gradient, float& weight, float* slots) {
    const float update = gradient * f.gradient + f.weight_decay * weight;
    slots[0] = f.momentum * slots[0] + f.lr * f.trust_ratio * update;
    weight -= f.lr == 0.0F ? 0.0F : slots[0];  // a momentum of earlier rates moves no weight then
  }
};

/// LAMB as documented at OptimizerOptions. `measure` updates the means; `apply` recomputes the same
/// update from them, which moves no more memory than storing it.
struct FlatLamb : FlatRuleBase {
  static constexpr int kSlots = 2;
  static constexpr bool kMeasures = true;
  static constexpr bool kMeasureWritesSlots = true;
  static constexpr bool kApplyReadsGradient = false;
  static constexpr bool kApplyWritesSlots = false;
  static DDP_HOST_DEVICE_INLINE float update(const FlatFactors& f, float weight,
                                             const float* slots) {
    return slots[0] * f.mean_scale / (sqrtf(slots[1]) * f.square_scale + f.eps) +
           f.weight_decay * weight;
  }
  static DDP_HOST_DEVICE_INLINE float measure(const FlatRule& /*rule*/, const FlatFactors& f,
                                              float gradient, float weight, float* slots) {
    gradient *= f.gradient;
    slots[0] = f.beta1 * slots[0] + f.one_minus_beta1 * gradient;
    slots[1] = f.beta2 * slots[1] + f.one_minus_beta2 * gradient * gradient;
    return update(f, weight, slots);
  }
  static DDP_HOST_DEVICE_INLINE void apply(const FlatRule& /*rule*/, const FlatFactors& f,
                                           float /*gradient*/, float& weight, float* slots) {
    weight -= f.lr * f.trust_ratio * update(f, weight, slots);
  }
};

/// Calls `body` with the rule's arithmetic as a type.
template <typename Body>
void with_flat_rule(const FlatRule& rule, Body body) {
  switch (rule.type) {
    case FlatRuleType::Sgd:
      rule.has_momentum ? body(FlatSgd<true>()) : body(FlatSgd<false>());
      break;
    case FlatRuleType::Adam:
      rule.amsgrad ? body(FlatAdam<true>()) : body(FlatAdam<false>());
      break;
    case FlatRuleType::Lars:
      body(FlatLars());
      break;
    case FlatRuleType::Lamb:
      body(FlatLamb());
  }
}

/// A read-only pass: the norm of all gradients and whether they are finite.
struct FlatScan {
  const FlatSegment* segments = nullptr;
  const FlatChunk* chunks = nullptr;
  FlatScalar inverse_scale;
  float max_norm = 0.0F;
  int32_t num_chunks = 0;
  double* sums = nullptr;  ///< [chunks] of squares, in float64 because float32 may overflow
  int32_t* bad = nullptr;  ///< [chunks] 1 if an element is inf or NaN, else 0
  float* found = nullptr;  ///< [4]: norm, found_inf, clip_factor; the bits of an int32: first bad
  int32_t* report = nullptr;  ///< [2]: scans with such an element, and the last one's segment
};

DDP_HOST_DEVICE_INLINE bool flat_is_finite(float value) {
  return value - value == 0.0F;
}

/// Writes the results of a scan.
DDP_HOST_DEVICE_INLINE void flat_conclude(const FlatScan& scan, double square, int32_t first_bad) {
  const double norm = sqrt(square);
  scan.found[0] = static_cast<float>(norm);
  scan.found[1] = first_bad >= 0 ? 1.0F : 0.0F;
  double factor = 1.0;
  if (scan.max_norm > 0.0F) {
    factor = scan.max_norm / (norm + 1e-6);
    factor = factor > 1.0 ? 1.0 : factor;  // a NaN stays, as in PyTorch
  }
  scan.found[2] = static_cast<float>(factor);
  reinterpret_cast<int32_t*>(scan.found)[3] = first_bad;
  if (first_bad >= 0) {
    scan.report[0] += 1;
    scan.report[1] = first_bad;
  }
}

/// One tensor of a moving average.
struct FlatAverage {
  float* average = nullptr;
  const void* weight = nullptr;
  int64_t numel = 0;
  FlatDtype dtype = FlatDtype::Float32;  ///< of the weight
  bool aligned = false;
};

/// at::lerp's formula.
DDP_HOST_DEVICE_INLINE float flat_lerp(float from, float to, float share) {
  return share < 0.5F ? from + share * (to - from) : to - (to - from) * (1.0F - share);
}

}  // namespace ddp::detail
