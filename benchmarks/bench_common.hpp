// SPDX-License-Identifier: Apache-2.0
// Common parts of the training benchmarks: settings, timed rounds, memory, a profile, and turns
// with other programs as controlled by benchmarks/interleaved.py.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bench_profile.hpp"
#include "ddp/amp/amp.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "ddp/train/command_line.hpp"
#include "ddp/train/config.hpp"

#if DDP_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#endif

namespace bench {

/// key=value arguments over `defaults`, which lists all keys.
class Settings {
 public:
  using Values = std::map<std::string, std::string>;

  Settings(std::string program, Values defaults, int argc, char** argv)
      : program_(std::move(program)), values_(std::move(defaults)) {
    for (const auto& [key, value] : protocol_defaults()) {
      values_.emplace(key, value);
    }
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const auto equals = argument.find('=');
      const auto key = argument.substr(0, equals);
      if (equals == std::string::npos || values_.count(key) == 0) {
        throw ddp::SettingsError(program_ + ": unknown argument " + argument + "; there are " +
                                 keys());
      }
      const bool is_number = parse<double>(values_[key]).has_value();  // the default is a number
      values_[key] = argument.substr(equals + 1);
      if (is_number && values_[key] != "auto") {  // number() and real() refuse auto
        convert<double>(key);
      }
    }
  }

  /// All keys with their defaults, for --help.
  static std::string describe(Values defaults) {
    defaults.insert(protocol_defaults().begin(), protocol_defaults().end());
    std::string text = "\nsettings and their defaults:\n";
    for (const auto& [key, value] : defaults) {
      text += "  " + key + "=" + value + "\n";
    }
    return text;
  }

  const std::string& text(const std::string& key) const { return values_.at(key); }
  int64_t number(const std::string& key) const { return convert<int64_t>(key); }
  double real(const std::string& key) const { return convert<double>(key); }
  bool flag(const std::string& key) const { return text(key) == "true" || text(key) == "1"; }
  /// Returns the entry of `choices` for the setting's text.
  template <typename T>
  T choice(const std::string& key, const std::vector<std::pair<std::string, T>>& choices) const {
    std::string known;
    for (const auto& [name, value] : choices) {
      if (name == text(key)) {
        return value;
      }
      known += (known.empty() ? "" : ", ") + name;
    }
    throw ddp::SettingsError(program_ + ": " + key + "=" + text(key) + ", there are " + known);
  }

  /// libddp's settings with this setting's text as its `library_key`: it knows its enumerators.
  ddp::Config library(const std::string& library_key, const std::string& key) const {
    const std::string argument = library_key + "=" + text(key);
    const char* argv[] = {program_.c_str(), argument.c_str()};
    return ddp::Config::from_command_line(2, argv);
  }

 private:
  /// Defaults of every benchmark of training steps.
  static const Values& protocol_defaults() {
    static const Values values = {{"steps", "20"},        {"warmup", "15"},
                                  {"lead_in", "0"},       {"host_repeats", "5"},
                                  {"rounds", "5"},        {"wrap", "ddp"},
                                  {"init_sync", "true"},  {"device", "auto"},
                                  {"nccl_max_ctas", "0"}, {"release_memory", "false"},
                                  {"profile", ""},        {"profile_steps", "5"},
                                  {"gate", ""},           {"name", "libddp"}};
    return values;
  }
  template <typename T>
  static std::optional<T> parse(const std::string& value_text) {
    T value{};
    const auto* end = value_text.data() + value_text.size();
    const auto result = std::from_chars(value_text.data(), end, value);
    const bool whole = result.ec == std::errc() && result.ptr == end;
    return whole ? std::optional<T>(value) : std::nullopt;
  }
  template <typename T>
  T convert(const std::string& key) const {
    const auto value = parse<T>(text(key));
    if (!value) {
      throw ddp::SettingsError(program_ + ": " + key + "=" + text(key) + " is no number");
    }
    return *value;
  }
  std::string keys() const {
    std::string all;
    for (const auto& item : values_) {
      all += (all.empty() ? "" : ", ") + item.first;
    }
    return all;
  }

  std::string program_;
  Values values_;
};

inline ddp::AmpDtype amp_dtype(const Settings& settings, const std::string& key) {
  return settings.choice<ddp::AmpDtype>(
      key,
      {{"bf16", ddp::AmpDtype::Bf16}, {"fp16", ddp::AmpDtype::Fp16}, {"fp32", ddp::AmpDtype::Off}});
}

/// Settings of the wrapper that all benchmarks of training steps have. PowerSGD starts at once.
inline ddp::DdpOptions ddp_options(const Settings& settings) {
  ddp::DdpOptions options;
  options.bucket_cap_mb = settings.library("ddp.bucket_cap_mb", "bucket_cap_mb").ddp.bucket_cap_mb;
  options.comm_hook = settings.library("ddp.comm_hook", "comm_hook").ddp.comm_hook;
  options.powersgd_rank = settings.number("powersgd_rank");
  options.powersgd_start_step = 0;
  options.fp32_grads = settings.flag("fp32_grads");
  options.init_sync = settings.flag("init_sync");
  return options;
}

inline void synchronize(at::Device device) {
  if (device.is_cuda()) {
    torch::cuda::synchronize();
  }
}

/// Device memory in use by all processes.
inline double used_mib(at::Device device) {
#if DDP_HAS_CUDA
  if (device.is_cuda()) {
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
      return static_cast<double>(total - free) / (1 << 20);
    }
  }
#endif
  static_cast<void>(device);
  return 0;
}

/// Frees cached device memory, so that two programs fit on the device.
inline void release(const Settings& settings, at::Device device) {
#if DDP_HAS_CUDA
  if (device.is_cuda() && settings.flag("release_memory")) {
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
#endif
  static_cast<void>(settings);
  static_cast<void>(device);
}

inline double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

/// CPU time of all threads of this process.
inline double process_cpu_us() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// A training step with the times of its rounds.
struct Loop {
  std::string name;
  std::function<void()> step;
  std::vector<double> round_ms;
  double host_ms = 0;
  double host_us = 0;  ///< CPU time of all threads of the process
  bool is_graph = false;
  std::function<double()> last_exposed_ms{};  ///< of the last step's communication; may be empty
  std::vector<double> round_exposed_ms{};     ///< of each round's last step
  double exposed_ms = 0;                      ///< their median, on the rank with the largest one

  /// Measures the time in which the host issues a step into an empty queue. If this reaches the
  /// step's own time, the host is the bottleneck. A full queue makes the host wait, so it is
  /// emptied before each step. A step of one launch is issued behind another one, as in a run: the
  /// first launch after the host slept costs several times as much.
  void measure_host(at::Device device, int64_t repeats) {
    if (repeats == 0) {
      return;
    }
    std::vector<double> wall_ms;
    std::vector<double> cpu_us;
    for (int64_t i = 0; i < repeats; ++i) {
      synchronize(device);
      if (is_graph) {
        step();
      }
      const double cpu_begin = process_cpu_us();
      const auto begin = std::chrono::steady_clock::now();
      step();
      wall_ms.push_back(milliseconds_since(begin));
      cpu_us.push_back(process_cpu_us() - cpu_begin);
    }
    synchronize(device);
    host_ms = median(wall_ms);
    host_us = median(cpu_us);
  }
  void run_round(const Settings& settings, at::Device device) {
    const int64_t steps = settings.number("steps");
    for (int64_t i = 0; i < settings.number("lead_in"); ++i) {
      step();
    }
    synchronize(device);
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < steps; ++i) {
      step();
    }
    synchronize(device);
    round_ms.push_back(milliseconds_since(begin) / static_cast<double>(steps));
    if (last_exposed_ms) {
      round_exposed_ms.push_back(last_exposed_ms());
    }
  }
  /// Collective.
  void agree_on_exposed(ddp::Communicator& communicator) {
    if (!last_exposed_ms) {
      return;
    }
    const auto most =
        torch::full({}, median(round_exposed_ms),
                    torch::TensorOptions().device(communicator.device()).dtype(torch::kFloat64));
    communicator.all_reduce(most, ddp::ReduceOp::Max)->wait();
    exposed_ms = most.item<double>();
  }
  double median_ms() const { return median(round_ms); }
};

/// Takes turns with other programs; benchmarks/interleaved.py controls them through files.
class Gate {
 public:
  explicit Gate(const Settings& settings)
      : folder_(settings.text("gate")),
        prefix_(folder_.empty() ? "" : folder_ + "/" + settings.text("name")) {}

  void wait_for(const std::string& what) const {
    while (!prefix_.empty() && !std::filesystem::exists(prefix_ + "." + what)) {
      if (!std::filesystem::exists(folder_)) {  // the controlling program has ended
        throw std::runtime_error(folder_ + " is gone: nobody waits for this program");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  /// Call it on one rank. Writes a temporary file and renames it, so that readers see it complete.
  void answer(const std::string& what, double value) const {
    if (prefix_.empty()) {
      return;
    }
    const auto path = prefix_ + "." + what;
    std::ofstream(path + ".part") << value;
    std::filesystem::rename(path + ".part", path);
  }

 private:
  std::string folder_;
  std::string prefix_;
};

/// Uses no device before this program's turn to start.
inline ddp::Context create_context(const Settings& settings) {
  Gate(settings).wait_for("start");
  ddp::ContextOptions options;
  options.device = settings.library("context.device", "device").context.device;
  options.communicator.nccl_max_ctas = settings.number("nccl_max_ctas");
  return ddp::Context::create(options);
}

/// Every rank takes part in profiled steps. If the path holds {rank}, each rank writes its own
/// file; otherwise only rank 0 writes.
inline std::string profile_path(const std::string& path, const ddp::Context& context) {
  const std::string place = "{rank}";
  const auto at = path.find(place);
  if (at == std::string::npos) {
    return context.is_main() ? path : "/dev/null";
  }
  return std::string(path).replace(at, place.size(), std::to_string(context.rank()));
}

/// Runs the warm-up, then `rounds` rounds of all loops, each in this program's turn, then the first
/// loop's profile if requested. Returns the device memory in use after the warm-up, in MiB.
inline double measure_rounds(const Settings& settings, const ddp::Context& context,
                             std::vector<Loop>& loops) {
  const auto device = context.device();
  for (auto& loop : loops) {
    for (int64_t i = 0; i < settings.number("warmup"); ++i) {
      loop.step();
    }
    loop.measure_host(device, settings.number("host_repeats"));
  }
  const double peak_mib = used_mib(device);
  release(settings, device);
  const Gate gate(settings);
  const auto answer = [&](const std::string& what, double value) {
    context.communicator()->barrier();  // all ranks have released their devices
    if (context.is_main()) {
      gate.answer(what, value);
    }
  };
  answer("ready", peak_mib);
  for (int64_t round = 0; round < settings.number("rounds"); ++round) {
    gate.wait_for("go" + std::to_string(round));
    context.communicator()->barrier();
    for (auto& loop : loops) {
      loop.run_round(settings, device);
    }
    release(settings, device);
    answer("done" + std::to_string(round), loops.front().round_ms.back());
  }
  for (auto& loop : loops) {
    loop.agree_on_exposed(*context.communicator());
  }
  if (!settings.text("profile").empty()) {
    gate.wait_for("profile");
    context.communicator()->barrier();
    write_profile(profile_path(settings.text("profile"), context), device,
                  settings.number("profile_steps"), loops.front().step);
    answer("profiled", settings.real("profile_steps"));
  }
  return peak_mib;
}

/// Runs `measure` and returns the program's exit code.
/// Answers --help with `usage`, or returns the exit code of `measure`.
inline int run_main(int argc, char** argv, const std::string& usage,
                    const std::function<int()>& measure) {
  if (ddp::answer_command_line(argc, argv, usage)) {
    return 0;
  }
  try {
    return measure();
  } catch (const ddp::Error& error) {
    std::cerr << error.what() << '\n';
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}

}  // namespace bench
