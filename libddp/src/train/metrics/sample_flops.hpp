// SPDX-License-Identifier: Apache-2.0
// What a step computes per sample, and the share of the device's peak: MFU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ops/shared/flop_counter.hpp"
#include "train/metrics/ranks/peak_flops.hpp"

namespace ddp::detail {

/// Counts the ops of the second step of this start, or of the first later one with samples while no
/// other object counts. With graph.warmup_steps=1 that step is a capture. A replay leaves the FLOPs
/// unknown. `given_peak_tflops` of the program replaces the
/// table's; 0: none. Throws SettingsError if it is negative or not finite.
class SampleFlops {
 public:
  explicit SampleFlops(double given_peak_tflops);

  /// Given by the program instead of the count. Throws SettingsError unless finite and above 0.
  void set(double flops_per_sample);
  /// A step of `num_samples` on this rank ended. Returns true once, when all is known.
  bool end_step(int64_t num_samples, const std::string& gpu_name);
  /// Ops of pauses do not count.
  void set_paused(bool on);

  std::optional<double> per_sample() const { return per_sample_; }
  /// Of one rank's device, in the precision of most products.
  std::optional<double> peak_tflops() const { return peak_; }
  /// How the two were found.
  std::string text(const std::string& sample_unit) const;

 private:
  const double given_peak_;
  bool is_given_ = false;
  bool is_complete_ = false;
  bool is_paused_ = false;
  std::optional<ops::detail::FlopCounter> counter_;  // between the first step and the count's end
  std::optional<double> per_sample_, peak_;
  std::string peak_source_;
};

}  // namespace ddp::detail
