// SPDX-License-Identifier: Apache-2.0
// Speed of each rank's device: matrix products and copies. All ranks measure at the same time,
// because they share power, cooling and the host's memory.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

#include "checks.hpp"
#include "ddp/detail/text.hpp"
#include "gpu_health.hpp"
#include "run.hpp"
#include "stopwatch.hpp"

#if DDP_HAS_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace cluster_check {
namespace {

constexpr int kTrialCalls = 3;  // the first call loads kernels
constexpr std::chrono::milliseconds kSampleInterval{20};

/// How long a measurement takes.
struct Durations {
  double burst_ms, warm_up_ms, measured_ms;
};

Durations durations_of(const Run& run) {
  if (!run.on_gpu()) {
    return {10, 20, 100};
  }
  return run.options.quick ? Durations{50, 300, 1000} : Durations{50, 1000, 2000};
}

using ThrottleReasons = std::optional<unsigned long long>;  // nothing: not known

void join(ThrottleReasons& all, ThrottleReasons more) {
  if (more) {
    all = all.value_or(0) | *more;
  }
}

/// Samples taken while a measurement ran: means of clock and power, the highest temperature, and
/// all reasons for lower clocks.
struct LoadSamples {
  struct Mean {
    double sum = 0;
    int count = 0;

    void add(std::optional<double> value) {
      sum += value.value_or(0);
      count += value.has_value();
    }
  };
  Mean sm_mhz, watts;
  double celsius = 0;
  ThrottleReasons throttle_reasons;

  void add(const GpuClocks& clocks) {
    sm_mhz.add(clocks.sm_mhz);
    watts.add(clocks.watts);
    celsius = std::max(celsius, clocks.celsius.value_or(0));
    join(throttle_reasons, clocks.throttle_reasons);
  }
  /// Leaves out what no sample had.
  std::string describe(const GpuClocks& limits) const {
    ddp::detail::TextStream out;
    out.precision(0);
    out << std::fixed;
    const auto add_mean = [&](const Mean& mean, std::optional<double> limit, const char* unit) {
      if (mean.count > 0) {
        out << (out.tellp() > 0 ? ", " : "") << mean.sum / mean.count;
        if (limit) {
          out << " of " << *limit;
        }
        out << ' ' << unit;
      }
    };
    add_mean(sm_mhz, limits.max_sm_mhz, "MHz");
    add_mean(watts, limits.limit_watts, "W");
    if (celsius > 0) {
      out << (out.tellp() > 0 ? ", " : "") << celsius << " C";
    }
    if (throttle_reasons) {
      out << (out.tellp() > 0 ? ", " : "")
          << "limited by: " << ddp::detail::nvml::describe_throttle_reasons(*throttle_reasons);
    }
    return out.str();
  }
};

struct Rate {
  double burst_calls_per_s = 0;
  double calls_per_s = 0;
  LoadSamples samples;
};

/// Calls `work` for about `ms`, and returns calls per second. Samples clocks meanwhile.
double run_for(Run& run, const std::function<void()>& work, double ms, double ms_per_call,
               LoadSamples* samples) {
  Stopwatch watch(run.context.device());
  const auto calls = std::max<int64_t>(1, std::llround(ms / ms_per_call));
  const bool samples_clocks = samples != nullptr && run.gpu != nullptr;
  auto next_sample = std::chrono::steady_clock::now() + kSampleInterval;
  watch.start();
  for (int64_t i = 0; i < calls; ++i) {
    work();
    if (samples_clocks && std::chrono::steady_clock::now() >= next_sample) {
      samples->add(read_gpu_clocks(run.gpu));
      next_sample = std::chrono::steady_clock::now() + kSampleInterval;
    }
  }
  watch.stop();
  while (samples_clocks && !watch.is_done()) {
    samples->add(read_gpu_clocks(run.gpu));
    std::this_thread::sleep_for(kSampleInterval);
  }
  return static_cast<double>(calls) * 1000 / watch.milliseconds();
}

/// Burst, warm-up and measurement of `work`, on all ranks at the same time.
Rate measure(Run& run, const std::function<void()>& work) {
  const auto durations = durations_of(run);
  Stopwatch watch(run.context.device());
  for (int i = 0; i < kTrialCalls; ++i) {
    watch.start();
    work();
    watch.stop();
  }
  const double trial_ms = watch.milliseconds();
  run.context.communicator()->barrier();
  Rate rate;
  rate.burst_calls_per_s = run_for(run, work, durations.burst_ms, trial_ms, nullptr);
  const double ms = 1000 / rate.burst_calls_per_s;
  const double warm_ms = 1000 / run_for(run, work, durations.warm_up_ms, ms, nullptr);
  rate.calls_per_s = run_for(run, work, durations.measured_ms, warm_ms, &rate.samples);
  return rate;
}

/// A product of [size, size] matrices of normal random numbers.
std::function<void()> make_product(const std::string& dtype, int64_t size, at::Device device) {
  const auto draw = [&] { return torch::randn({size, size}, device); };
  if (dtype == "fp8") {
    const auto a = draw().to(at::kFloat8_e4m3fn);
    const auto b = draw().to(at::kFloat8_e4m3fn).t();  // column-major, as cublasLt needs it
    const auto one = torch::ones({}, torch::TensorOptions().device(device).dtype(torch::kFloat));
    auto out = torch::empty({size, size}, a.options().dtype(torch::kBFloat16));
    return [a, b, one, out]() mutable {
      at::_scaled_mm_out(out, a, b, one, one, {}, {}, torch::kBFloat16, /*use_fast_accum=*/true);
    };
  }
  const auto kind = dtype == "bf16"   ? torch::kBFloat16
                    : dtype == "fp16" ? torch::kHalf
                                      : torch::kFloat32;
  const auto a = draw().to(kind), b = draw().to(kind);
  auto out = torch::empty_like(a);
  return [a, b, out]() mutable { at::mm_out(out, a, b); };
}

/// Enables TF32 in its scope.
class Tf32Scope {
 public:
  explicit Tf32Scope(bool enabled) : saved_(at::globalContext().allowTF32CuBLAS()) {
    at::globalContext().setAllowTF32CuBLAS(enabled);
  }
  ~Tf32Scope() { at::globalContext().setAllowTF32CuBLAS(saved_); }
  Tf32Scope(const Tf32Scope&) = delete;
  Tf32Scope& operator=(const Tf32Scope&) = delete;

 private:
  bool saved_;
};

bool multiplies([[maybe_unused]] const Run& run, [[maybe_unused]] const std::string& dtype) {
#if DDP_HAS_CUDA
  if (run.on_gpu() && dtype == "fp8") {
    const auto* properties = at::cuda::getDeviceProperties(run.context.device().index());
    return properties->major > 8 || (properties->major == 8 && properties->minor >= 9);
  }
#endif
  return true;
}

struct Product {
  double tflops = 0;
  ThrottleReasons throttle_reasons;
};

/// Adds the product's row.
Product check_product(Run& run, const std::string& dtype, int64_t size) {
  const auto name = gemm_name(dtype, size);
  run.begin(name);
  const Tf32Scope tf32(dtype == "tf32");
  const auto rate = measure(run, make_product(dtype, size, run.context.device()));
  const double flops = 2 * std::pow(static_cast<double>(size), 3);
  const double tflops = rate.calls_per_s * flops / 1e12;
  ddp::detail::TextStream text;
  text.precision(4);
  text << "burst " << rate.burst_calls_per_s * flops / 1e12;
  const auto load = rate.samples.describe(read_gpu_clocks(run.gpu));
  text << (load.empty() ? "" : ", ") << load;
  run.add("gpu", name, tflops, "TFLOP/s", text.str(), run.context.rank());
  return {tflops, rate.samples.throttle_reasons};
}

void check_products(Run& run) {
  const int rank = run.context.rank();
  if (!run.on_gpu()) {
    check_product(run, "fp32", 512);
    return;
  }
  double best = 0;
  ThrottleReasons reasons;
  for (const char* dtype : {"bf16", "fp16", "tf32", "fp8"}) {
    for (const int64_t size : {4096, 8192, 16384}) {
      const bool wanted = !run.options.quick || (size == 8192 && std::string(dtype) == "bf16");
      if (!wanted) {
        continue;
      }
      if (!multiplies(run, dtype)) {
        run.add("gpu", gemm_name(dtype, size), {}, "TFLOP/s", "not on this GPU", rank);
        continue;
      }
      const auto product = check_product(run, dtype, size);
      best = std::string(dtype) == "bf16" ? std::max(best, product.tflops) : best;
      join(reasons, product.throttle_reasons);
    }
  }
  if (!run.options.quick) {
    run.add("gpu", "gemm_bf16_best", best, "TFLOP/s", "", rank);
  }
  run.add(
      "gpu", "slowdown_under_load",
      reasons ? std::optional<double>(ddp::detail::nvml::count_slowdowns(*reasons)) : std::nullopt,
      "", reasons ? ddp::detail::nvml::describe_throttle_reasons(*reasons) : "", rank);
}

void check_copies(Run& run) {
  run.begin("copies");
  const int64_t bytes = run.on_gpu() ? int64_t{1} << 30 : int64_t{1} << 24;
  const auto memory = torch::TensorOptions().dtype(torch::kUInt8);
  const auto source = torch::ones({bytes}, memory.device(run.context.device()));
  const auto target = torch::empty_like(source);
  const int rank = run.context.rank();
  const auto copy = [](at::Tensor to, const at::Tensor& from) {
    return [to, from] { to.copy_(from, /*non_blocking=*/true); };
  };
  const auto size = static_cast<double>(bytes);
  const auto on_device = measure(run, copy(target, source));
  run.add("gpu", "device_copy", 2 * size * on_device.calls_per_s / 1e12, "TB/s",
          on_device.samples.describe(read_gpu_clocks(run.gpu)), rank);
  if (run.options.quick || !run.on_gpu()) {
    return;
  }
  const auto host = torch::empty({bytes}, memory.pinned_memory(true));
  run.add("gpu", "host_to_device", size * measure(run, copy(target, host)).calls_per_s / 1e9,
          "GB/s", "pinned", rank);
  run.add("gpu", "device_to_host", size * measure(run, copy(host, source)).calls_per_s / 1e9,
          "GB/s", "pinned", rank);
}

}  // namespace

void check_gpu_speed(Run& run) {
  const torch::NoGradGuard no_grad;
  check_products(run);
  check_copies(run);
}

}  // namespace cluster_check
