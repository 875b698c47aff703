// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "ddp/detail/model_weights.hpp"

namespace ddp::ops {
namespace {

struct WeightCopies {
  std::mutex mutex;
  std::vector<std::weak_ptr<WeightCopy>> copies;
};

// Never destroyed: a model may be static.
WeightCopies& weight_copies() {
  static auto& copies = *new WeightCopies;
  return copies;
}

std::atomic<uint64_t> num_invalidations{0};

}  // namespace

void register_weight_copy(const std::shared_ptr<WeightCopy>& copy) {
  const std::lock_guard lock(weight_copies().mutex);
  weight_copies().copies.push_back(copy);
}

void refresh_weight_copies() {
  const std::lock_guard lock(weight_copies().mutex);
  auto& copies = weight_copies().copies;
  copies.erase(std::remove_if(copies.begin(), copies.end(),
                              [](const auto& weak) {
                                const auto copy = weak.lock();
                                if (copy != nullptr) {
                                  copy->refresh();
                                }
                                return copy == nullptr;
                              }),
               copies.end());
}

void invalidate_graphs() {
  ++num_invalidations;
}

uint64_t graph_invalidations() {
  return num_invalidations;
}

}  // namespace ddp::ops
