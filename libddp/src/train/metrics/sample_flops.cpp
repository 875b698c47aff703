// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/sample_flops.hpp"

#include <ATen/Context.h>

#include <cmath>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// cuBLAS computes products of float32 factors as TF32 if its setting allows that, and cuDNN
// convolutions.
std::optional<FactorType> factor_type(const ops::detail::FlopCounter& counter) {
  switch (counter.dtype()) {
    case at::kBFloat16:
      return FactorType::BFloat16;
    case at::kHalf:
      return FactorType::Half;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return FactorType::Fp8;
    case at::kFloat: {
      const auto precision = at::globalContext().float32Precision(
          at::Float32Backend::CUDA,
          counter.are_float_convolutions() ? at::Float32Op::CONV : at::Float32Op::MATMUL);
      return precision == at::Float32Precision::TF32 ? FactorType::Tf32 : FactorType::Float32;
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

SampleFlops::SampleFlops(double given_peak_tflops) : given_peak_(given_peak_tflops) {
  if (!(given_peak_ >= 0) || std::isinf(given_peak_)) {
    throw SettingsError(concat("RunInfo::peak_tflops=", given_peak_,
                               " must be finite and 0 or more; fix: give the TFLOP/s of rank "
                               "0's device, or 0 to have them by the GPU's name"));
  }
}

void SampleFlops::set(double flops_per_sample) {
  if (!(flops_per_sample > 0) || std::isinf(flops_per_sample)) {
    throw SettingsError(concat("Metrics::set_flops_per_sample: ", flops_per_sample,
                               " must be a finite number above 0; fix: leave the call out to have "
                               "them counted"));
  }
  is_given_ = true;
  per_sample_ = flops_per_sample;
}

bool SampleFlops::end_step(int64_t num_samples, const std::string& gpu_name) {
  if (is_complete_) {
    return false;
  }
  if (!counter_ || !counter_->is_active() || num_samples == 0) {
    counter_.reset();
    counter_.emplace();  // for the next step
    counter_->set_paused(is_paused_);
    return false;
  }
  is_complete_ = true;
  const double flops = counter_->flops();
  auto type = factor_type(*counter_);
  counter_.reset();
  if (!is_given_ && flops > 0) {
    per_sample_ = flops / static_cast<double>(num_samples);
  }
  if (type == FactorType::Tf32 && !detail::peak_tflops(gpu_name, *type)) {
    type = FactorType::Float32;  // an older GPU
  }
  if (given_peak_ > 0) {
    peak_ = given_peak_;
    peak_source_ = "given";
  } else if (type) {
    peak_ = detail::peak_tflops(gpu_name, *type);
    peak_source_ = concat(gpu_name, ", ", to_string(*type));
  }
  return per_sample_.has_value();
}

void SampleFlops::set_paused(bool on) {
  is_paused_ = on;
  if (counter_) {
    counter_->set_paused(on);
  }
}

std::string SampleFlops::text(const std::string& sample_unit) const {
  const std::string how =
      is_given_ ? "given by the program" : "products, convolutions and attention of one step";
  return concat("MFU: ", per_sample_.value_or(0) * 1e-9, " GFLOP for each of the ", sample_unit,
                " (", how, "); peak ",
                peak_ ? concat(*peak_, " TFLOP/s (", peak_source_, ")") : "unknown");
}

}  // namespace ddp::detail
