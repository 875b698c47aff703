// SPDX-License-Identifier: Apache-2.0
// Measured choices (algorithms, bucket cuts) by name, with the hardware and versions they depend
// on. The entry "kernels" (algorithms of convolutions and matrix products) holds only rank 0's.
// Other ranks use their own until all load the plan. Checkpoints and plan files store a plan as
// JSON. On the same hardware and library versions its choices are reused; otherwise everything is
// measured again.
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
  /// Dependencies of the choices, by name ("gpu", "nccl", "cudnn", "world_size", …).
  using Identity = std::map<std::string, std::string>;

  explicit Plan(Identity identity = {}) : identity_(std::move(identity)) {}

  const Identity& identity() const { return identity_; }
  bool empty() const { return choices_.empty(); }
  /// The JSON text of a choice; nothing if it was not made yet.
  std::optional<std::string> find(const std::string& name) const;
  /// `json` is any JSON value. Throws SettingsError if it is not valid JSON.
  void set(const std::string& name, const std::string& json);
  /// Grows with every set() and adopt(), so that caches of parsed choices can detect changes.
  int64_t version() const { return version_; }

  std::string to_json() const;
  /// Adopts the choices of `json`; they replace choices of the same name. Returns an empty string
  /// if adopted. If the identities differ, nothing changes and the result names the difference
  /// ("gpu: NVIDIA H100 PCIe, here NVIDIA H200"). Throws ReadError with `origin` if it is not a
  /// plan.
  std::string adopt(const std::string& json, const std::string& origin);

 private:
  Identity identity_;
  std::map<std::string, std::string> choices_;
  int64_t version_ = 0;
};

}  // namespace ddp
