// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/multiprocessors.hpp"

#include <mutex>
#include <set>

namespace ddp::ops {
namespace {

struct Reservations {
  std::mutex mutex;
  std::multiset<int> counts;
};

// Never destroyed: a communicator may outlive this file's statics.
Reservations& reservations() {
  static auto* all = new Reservations;
  return *all;
}

}  // namespace

MultiprocessorReservation::MultiprocessorReservation(int count) : count_(count) {
  auto& all = reservations();
  const std::lock_guard lock(all.mutex);
  all.counts.insert(count_);
}

MultiprocessorReservation::~MultiprocessorReservation() {
  auto& all = reservations();
  const std::lock_guard lock(all.mutex);
  all.counts.erase(all.counts.find(count_));
}

int reserved_multiprocessors() {
  auto& all = reservations();
  const std::lock_guard lock(all.mutex);
  return all.counts.empty() ? 0 : *all.counts.rbegin();
}

}  // namespace ddp::ops
