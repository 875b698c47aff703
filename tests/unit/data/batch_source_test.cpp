// SPDX-License-Identifier: Apache-2.0
// The parts behind DataLoader: batch numbers and saved places, and batches made ahead.
#include <torch/torch.h>

#include <memory>
#include <new>
#include <vector>

#include "data/loader/batch_plan.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/batch_source.hpp"
#include "ddp/detail/prefetch_source.hpp"
#include "support/catch.hpp"

using ddp::DistributedSampler;
using ddp::LoaderOptions;
using ddp::detail::BatchBuilder;
using ddp::detail::EpochBatches;
using ddp::detail::PrefetchSource;

namespace {

// Batches are the sums of their indices. The first take()s throw, as without memory.
class SumBuilder : public BatchBuilder<int64_t> {
 public:
  SumBuilder(int num_slots, int64_t num_fails)
      : num_fails_(num_fails), indices_(static_cast<size_t>(num_slots)) {}
  void resize(int slot, int64_t num_samples) override {
    at(slot).assign(static_cast<size_t>(num_samples), 0);
  }
  void fill(int slot, int64_t place, int64_t index, int64_t) override {
    at(slot)[static_cast<size_t>(place)] = index;
  }
  void finish(int) override {}
  int64_t take(int slot) override {
    if (num_fails_-- > 0) {
      throw std::bad_alloc();
    }
    int64_t sum = 0;
    for (const int64_t index : at(slot)) {
      sum += index;
    }
    return sum;
  }

 private:
  std::vector<int64_t>& at(int slot) { return indices_[static_cast<size_t>(slot)]; }
  int64_t num_fails_;
  std::vector<std::vector<int64_t>> indices_;
};

}  // namespace

TEST_CASE("the number and the largest size of a rank's batches are those of its plan", "[loader]") {
  const bool drop_last = GENERATE(false, true);
  const int world_size = GENERATE(1, 3);
  const int rank = GENERATE(0, 2) % world_size;
  const DistributedSampler sampler(50, rank, world_size, {.pad = false});
  const EpochBatches batches(sampler, {.global_batch_size = 8, .drop_last = drop_last});
  CHECK(batches.global_size() == 8);
  CHECK(batches.max_size() == (world_size == 1 ? 8 : 3));
  int64_t left = batches.count_after(0);
  int64_t position = 0;
  while (const auto plan = ddp::detail::plan_batch(sampler, position, 8, drop_last)) {
    CHECK(batches.count_after(position) == left);
    CHECK(static_cast<int64_t>(plan->indices.size()) <= batches.max_size());
    left -= plan->indices.empty() ? 0 : 1;
    position = plan->end;
  }
  CHECK(left == 0);
}

TEST_CASE("a loader's place is restored from its state", "[loader]") {
  const DistributedSampler sampler(50, 0, 1, {.seed = 5});
  const EpochBatches batches(sampler, {.batch_size = 8});
  const auto state = batches.state_of({.epoch = 3, .position = 16});
  const auto place = EpochBatches(sampler, {.batch_size = 4}).place_in(state);
  CHECK(place.epoch == 3);
  CHECK(place.position == 16);
  const DistributedSampler unshuffled(50, 0, 1, {.shuffle = false, .seed = 5});
  CHECK_THROWS_AS(EpochBatches(unshuffled, {}).place_in(state), ddp::MismatchError);
}

TEST_CASE("a batch for which memory was missing is the next one", "[loader]") {
  const LoaderOptions options{.batch_size = 2, .num_workers = 1};
  const int num_slots = ddp::detail::LoaderEngine::num_slots(options);
  const DistributedSampler sampler(6, 0, 1, {.shuffle = false});
  PrefetchSource<int64_t> source(std::make_unique<SumBuilder>(num_slots, 2), sampler, at::kCPU,
                                 options, [](int64_t& sum) { sum *= 10; });
  CHECK_THROWS_AS(source.next(), std::bad_alloc);
  CHECK_THROWS_AS(source.next(), std::bad_alloc);
  CHECK(source.place().position == 0);
  for (const int64_t sum : {10, 50, 90, 10}) {  // of 0 + 1, 2 + 3, 4 + 5, and the next epoch
    CHECK(source.next() == sum);
  }
  CHECK(source.place().epoch == 1);
  CHECK(source.place().position == 2);
  source.restart({.epoch = 0, .position = 4});
  CHECK(source.next() == 90);
}
