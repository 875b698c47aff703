// SPDX-License-Identifier: Apache-2.0
// Lays the buckets out again, once, in the order in which gradients become ready. They are cut at
// the limits or, with ddp.bucket_cap_mb=auto, so that the least communication is exposed. That
// choice comes from the communicator's plan or from times measured in the first backwards:
//
//   backward  order known | host measured     | device measured      | rebuild
//   limits       0                                                     before 1
//   auto         0              1                    2                 before 3
//
// The device is measured with the host far ahead, behind a kernel that delays it. The host often
// limits an eager first backward, but never a captured one.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/tuning/all_reduce_table.hpp"
#include "ddp/comm/communicator.hpp"
#include "ops/shared/timing_event.hpp"
#include "reduce/buckets/bucket_reductions.hpp"
#include "reduce/buckets/gradient_arena.hpp"

namespace ddp::detail {

using ops::detail::TimingEvent;

class BucketTuner {
 public:
  BucketTuner(CommunicatorPtr communicator, const DdpOptions& options, GradientArena& gradients,
              const BucketReductions& reductions);

  bool has_rebuilt() const { return has_rebuilt_; }
  bool will_rebuild() const;
  /// Whether to rebuild before the forward that follows `num_passes` synchronised backwards. False
  /// while a graph is captured.
  bool is_due(int64_t num_passes, const std::vector<int>& ready_order);
  /// Gives all ranks rank 0's order and cuts. Collective.
  void rebuild(const std::vector<int>& ready_order);

  /// Call when the backward after `num_passes` others begins.
  void begin_backward(int64_t num_passes, const std::vector<int>& ready_order);
  void record_ready(int parameter, bool all_ready);
  void end_backward() { measures_host_ = measures_device_ = false; }

 private:
  int64_t first_with_order() const { return options_.static_graph ? 2 : 1; }
  std::string plan_name() const;
  std::optional<std::string> planned(const std::vector<int>& order);
  bool measures(const std::vector<int>& order);
  std::string choose(const std::vector<int>& order, const AllReduceTable& table);
  std::vector<int> agree_on_cuts(const std::vector<int>& order);

  CommunicatorPtr communicator_;
  DdpOptions options_;
  GradientArena& gradients_;
  const BucketReductions& reductions_;
  bool has_rebuilt_ = false;
  bool measures_host_ = false;    // in the running backward
  bool measures_device_ = false;  // in the running backward
  bool has_warned_of_plan_ = false;
  std::chrono::steady_clock::time_point host_begin_;
  double host_backward_ms_ = 0;
  TimingEvent ready_begin_;
  std::vector<TimingEvent> ready_times_;  // by parameter
};

}  // namespace ddp::detail
