// SPDX-License-Identifier: Apache-2.0
// Choices measured on a group, or adopted from a checkpoint or file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/tuning/all_reduce_table.hpp"
#include "core/files/plan.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// A backend's part in the choices measured on its groups.
class BackendMeasurements {
 public:
  virtual ~BackendMeasurements() = default;
  /// What the choices depend on, besides backend and world size.
  virtual Plan::Identity plan_identity() const { return {}; }
  /// Times of all_reduce on this rank; GroupChoices keeps the slowest rank's. Empty: the host times
  /// each run.
  virtual std::vector<AllReduceRow> measure_all_reduce() { return {}; }
};

class GroupChoices {
 public:
  explicit GroupChoices(Communicator& group) : group_(group) {}

  /// Equal on all ranks while all ranks make the same calls; "kernels" may differ (see Plan).
  Plan& plan();
  /// Adopts the choices of rank 0's `json` if every rank has the hardware and versions they were
  /// measured on. Otherwise no rank adopts and the log says so. Collective; the host waits. Throws
  /// ReadError naming `origin` on all ranks and then changes nothing.
  void adopt(const std::string& json, const std::string& origin);
  /// Times of all_reduce by size, from the plan or measured by the first call. Collective; the host
  /// waits. Empty for a group of one.
  const AllReduceTable& all_reduce_table();

 private:
  Communicator& group_;
  std::optional<Plan> plan_;
  AllReduceTable table_;
};

}  // namespace ddp::detail
