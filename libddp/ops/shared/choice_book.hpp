// SPDX-License-Identifier: Apache-2.0
// Chooses the fastest of a library's algorithms by measuring once. A plan can save the choices, so
// the next run makes the same ones without measuring.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace ddp::ops::detail {

/// The choice of candidate `chosen` of a library's `count` proposals.
struct MeasuredChoice {
  int64_t count = 0;
  int64_t chosen = 0;
  bool operator==(const MeasuredChoice&) const = default;
};
using MeasuredChoices = std::map<std::string, MeasuredChoice>;

/// The choices that this process made by measurement, by name. Safe to use from several threads.
class ChoiceBook {
 public:
  /// Limit of noted and adopted choices, for programs with ever new shapes (packed rows). Later
  /// shapes are measured again in each run.
  static constexpr size_t kMaxNoted = 2000;

  /// The process's book.
  static ChoiceBook& instance();

  /// nullopt if there is no choice for `what`, or for another `count`: the library's proposals have
  /// changed.
  std::optional<size_t> find(const std::string& what, size_t count) const;
  void note(const std::string& what, size_t count, size_t chosen);
  MeasuredChoices all() const;
  /// Adds choices and replaces those of equal name. Choices already in use stay until the process
  /// ends.
  void adopt(const MeasuredChoices& choices);

 private:
  void keep(const std::string& what, const MeasuredChoice& choice);

  mutable std::mutex mutex_;
  MeasuredChoices choices_;
};

#ifdef DDP_HAS_CUDA
/// Returns the index of the fastest of `count` calls, or `count` if none runs. Uses ChoiceBook's
/// choice for `what` if that call runs. Otherwise measures and notes the choice, except for an
/// empty `what`. Returns the first call within a factor `same_time` of the fastest: the library's
/// order, not noise, decides among equals. `call` enqueues one call on the current stream (a
/// private one) and throws c10::Error if the call does not run. Each call is captured several times
/// and replayed: timing single launches of 3 us would measure the host. The host waits, first for
/// the caller's stream. Threads measure one after another.
size_t choose_fastest(const std::string& what, c10::Device device, size_t count,
                      const std::function<void(size_t)>& call, float same_time = 1.02F);
#endif

}  // namespace ddp::ops::detail
