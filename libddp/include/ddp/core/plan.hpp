// SPDX-License-Identifier: Apache-2.0
// Choices that were measured (algorithms, bucket cuts) rather than set: kept by name, with what
// they were measured on. Equal on all ranks, but for "kernels" (algorithms of convolutions and
// products), which are rank 0's until all ranks adopt them. A checkpoint and a file hold it as
// JSON; where it is read back on the same hardware and library versions its choices are pinned,
// elsewhere it is dropped and everything is measured anew.
//
//   {"measured on": {"gpu": "NVIDIA H200", "nccl": "2.28.9", …}, "choices": {"all_reduce": …}}
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace ddp {

class Plan {
 public:
  /// What the choices depend on, by name ("gpu", "nccl", "cudnn", "world_size", …).
  using Identity = std::map<std::string, std::string>;

  explicit Plan(Identity identity = {}) : identity_(std::move(identity)) {}

  const Identity& identity() const { return identity_; }
  bool empty() const { return choices_.empty(); }
  /// The JSON text of a choice; nothing where it was not made yet.
  std::optional<std::string> find(const std::string& name) const;
  /// `json` is any JSON value. Throws SettingsError where it is none.
  void set(const std::string& name, const std::string& json);
  /// Grows with every set() and adopt(): whoever keeps a parsed choice compares.
  int64_t version() const { return version_; }

  std::string to_json() const;
  /// Takes over the choices of `json`, which replace those of equal name here. Where it was made on
  /// something else nothing changes, and the result says what differs ("gpu: NVIDIA H100 PCIe, here
  /// NVIDIA H200"); empty: taken over. Throws ReadError with `origin` where it is no plan.
  std::string adopt(const std::string& json, const std::string& origin);

 private:
  Identity identity_;
  std::map<std::string, std::string> choices_;
  int64_t version_ = 0;
};

/// The text of a plan file; empty where there is no such file. Throws ReadError.
std::string read_plan_file(const std::string& path);
/// Replaces the file, atomically. Throws WriteError.
void write_plan_file(const std::string& path, const Plan& plan);

}  // namespace ddp
