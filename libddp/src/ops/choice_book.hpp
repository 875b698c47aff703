// SPDX-License-Identifier: Apache-2.0
// What this process chose by measurement, by the name of what was asked: so that a plan can keep it
// for the next run, which then measures nothing and takes the same. Free of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace ddp::ops::detail {

/// The `chosen`th of `count` calls that a library proposed.
struct MeasuredChoice {
  int64_t count = 0;
  int64_t chosen = 0;
  bool operator==(const MeasuredChoice&) const = default;
};
using MeasuredChoices = std::map<std::string, MeasuredChoice>;

/// Safe to use from several threads.
class ChoiceBook {
 public:
  /// A program whose shapes never end (packed rows) keeps this many, noted or adopted; later ones
  /// are measured anew in each run.
  static constexpr size_t kMaxNoted = 2000;

  /// The process's.
  static ChoiceBook& instance();

  /// Nothing where `what` was not chosen yet, or among another number of calls: the library
  /// proposes others now.
  std::optional<size_t> find(const std::string& what, size_t count) const;
  void note(const std::string& what, size_t count, size_t chosen);
  MeasuredChoices all() const;
  /// Takes over choices, which replace those of equal name. What was already asked for stays what
  /// it is until the process ends.
  void adopt(const MeasuredChoices& choices);

 private:
  void keep(const std::string& what, const MeasuredChoice& choice);

  mutable std::mutex mutex_;
  MeasuredChoices choices_;
};

}  // namespace ddp::ops::detail
