// SPDX-License-Identifier: Apache-2.0
// Choices that this process made by measurement, by name. A plan can save them, so the next run
// makes the same choices without measuring. Independent of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
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

/// Safe to use from several threads.
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

}  // namespace ddp::ops::detail
