// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/sample_flops.hpp"

#include <ATen/Context.h>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// Float32 factors run as TF32 where a setting allows it: in products or in convolutions.
std::optional<FactorType> factor_type(at::ScalarType dtype) {
  const auto& context = at::globalContext();
  switch (dtype) {
    case at::kBFloat16:
    case at::kHalf:
      return FactorType::Half;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return FactorType::Fp8;
    case at::kFloat:
      return context.allowTF32CuBLAS() || context.allowTF32CuDNN() ? FactorType::Tf32
                                                                   : FactorType::Float32;
    default:
      return std::nullopt;
  }
}

}  // namespace

void SampleFlops::set(double flops_per_sample) {
  if (!(flops_per_sample > 0)) {
    throw SettingsError(concat("Metrics::set_flops_per_sample: ", flops_per_sample,
                               " must be above 0; fix: leave the call out to have them counted"));
  }
  is_given_ = true;
  per_sample_ = flops_per_sample;
}

bool SampleFlops::end_step(int64_t num_samples, const std::string& gpu_name) {
  if (++num_steps_ == 1) {
    counter_.emplace();
  }
  if (num_steps_ != 2) {
    return false;
  }
  const double flops = counter_->flops();
  auto type = factor_type(counter_->dtype());
  counter_.reset();
  if (!is_given_ && flops > 0 && num_samples > 0) {
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
  if (counter_) {
    counter_->set_paused(on);
  }
}

std::string SampleFlops::text(const std::string& sample_unit) const {
  const std::string how = is_given_ ? "given by the program"
                                    : "products, convolutions and attention of the second step";
  return concat("MFU: ", per_sample_.value_or(0) * 1e-9, " GFLOP for each of the ", sample_unit,
                " (", how, "); peak ",
                peak_ ? concat(*peak_, " TFLOP/s (", peak_source_, ")") : "unknown");
}

}  // namespace ddp::detail
