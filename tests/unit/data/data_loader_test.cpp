// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>

#include "data/loader/batch_plan.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/cifar10_sample.hpp"

using data_test::contains;
using data_test::kCpu;
using data_test::message_of;
using ddp::DataLoader;
using ddp::DistributedSampler;
using ddp::LoaderOptions;
using ddp::SamplerOptions;

namespace {

// A user's own data set: not a ddp::Dataset, a plain struct as example, later samples faster than
// earlier ones.
struct Numbers {
  struct Item {
    int64_t index;
    int64_t epoch;
  };
  int64_t num_samples;
  int64_t bad = -1;
  mutable std::atomic<int64_t> num_read{0};

  explicit Numbers(int64_t n, int64_t bad_index = -1) : num_samples(n), bad(bad_index) {}
  int64_t size() const { return num_samples; }
  Item get_for_epoch(int64_t index, int64_t epoch) const {
    ++num_read;
    if (index == bad) {
      throw std::out_of_range("broken sample");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(index % 7 * 20));
    return {index, epoch};
  }
};

struct NumberBatch {
  std::vector<int64_t> indices;
  int64_t epoch = -1;
};
void for_each_tensor(NumberBatch&, const ddp::TensorVisitor&) {}  // it has none

struct CollateNumbers {
  NumberBatch operator()(std::vector<Numbers::Item> items) const {
    NumberBatch batch;
    for (const auto& item : items) {
      batch.indices.push_back(item.index);
      batch.epoch = item.epoch;
    }
    return batch;
  }
};

using NumberLoader = DataLoader<Numbers, CollateNumbers>;

std::vector<int64_t> indices_of(NumberLoader& loader) {
  std::vector<int64_t> result;
  for (auto& batch : loader) {
    result.insert(result.end(), batch.indices.begin(), batch.indices.end());
  }
  return result;
}

std::vector<std::vector<int64_t>> next_batches(NumberLoader& loader, int count) {
  std::vector<std::vector<int64_t>> batches;
  for (int i = 0; i < count; ++i) {
    batches.push_back(loader.next().indices);
  }
  return batches;
}

std::vector<int64_t> epoch_of(DistributedSampler sampler, int64_t epoch) {
  sampler.set_epoch(epoch);
  return sampler.indices();
}

}  // namespace

TEST_CASE("batches follow the sampler through the epochs at any number of workers", "[loader]") {
  const int64_t num_workers = GENERATE(0, 1, 3);
  auto dataset = std::make_shared<Numbers>(53);
  DistributedSampler sampler(53, 1, 2, {.seed = 9});
  NumberLoader loader(dataset, sampler, kCpu, {.batch_size = 8, .num_workers = num_workers});
  REQUIRE(loader.num_batches() == 4);
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    const auto expected = epoch_of(sampler, epoch);
    std::vector<int64_t> seen;
    for (int64_t b = 0; b < 4; ++b) {
      REQUIRE(loader.epoch() == epoch);
      REQUIRE(loader.position() == b * 16);
      const auto batch = loader.next();
      REQUIRE(batch.epoch == epoch);
      REQUIRE(batch.indices.size() == (b < 3 ? 8 : 3));
      seen.insert(seen.end(), batch.indices.begin(), batch.indices.end());
    }
    REQUIRE(seen == expected);
  }
  REQUIRE(loader.epoch() == 4);
  REQUIRE(loader.position() == 0);
}

TEST_CASE("a range-for loop gives the rest of one epoch", "[loader]") {
  auto dataset = std::make_shared<Numbers>(30);
  DistributedSampler sampler(30, 0, 1);
  NumberLoader loader(dataset, sampler, kCpu, {.batch_size = 7});
  REQUIRE(indices_of(loader) == epoch_of(sampler, 0));
  REQUIRE(indices_of(loader) == epoch_of(sampler, 1));
  loader.begin_epoch(5);
  REQUIRE(indices_of(loader) == epoch_of(sampler, 5));
  (void)loader.next();
  auto rest = epoch_of(sampler, 6);
  rest.erase(rest.begin(), rest.begin() + 7);
  REQUIRE(indices_of(loader) == rest);
  loader.begin_epoch(0);
  REQUIRE(indices_of(loader) == epoch_of(sampler, 0));
}

TEST_CASE("drop_last drops the batch that is not full", "[loader]") {
  auto dataset = std::make_shared<Numbers>(30);
  NumberLoader loader(dataset, DistributedSampler(30, 0, 1), kCpu,
                      {.batch_size = 7, .drop_last = true});
  REQUIRE(loader.num_batches() == 4);
  REQUIRE(indices_of(loader).size() == 28);
  REQUIRE(loader.epoch() == 1);
  REQUIRE(contains(message_of<ddp::SettingsError>([&] {
                     NumberLoader(dataset, DistributedSampler(30, 0, 1), kCpu,
                                  {.batch_size = 31, .drop_last = true})
                         .next();
                   }),
                   "holds no batch of 31"));
}

TEST_CASE("the error of a rank without samples names the sampler's settings, not the batch size",
          "[loader]") {
  const auto refusal = [](int64_t size, const ddp::SamplerOptions& options) {
    auto dataset = std::make_shared<Numbers>(size);
    return message_of<ddp::SettingsError>([&] {
      NumberLoader(dataset, DistributedSampler(size, 3, 4, options), kCpu, {.batch_size = 2})
          .next();
    });
  };
  const auto dropped = refusal(3, {.drop_last = true});
  INFO(dropped);
  CHECK(contains(dropped, "3 samples leave none for rank 3 of 4"));
  CHECK(contains(dropped, "fix: sampler.drop_last=false, at most 3 ranks"));
  CHECK_FALSE(contains(dropped, "batch_size"));
  const auto unpadded = refusal(3, {.pad = false});
  INFO(unpadded);
  CHECK(contains(unpadded, "fix: sampler.pad=true, at most 3 ranks"));
  CHECK(contains(refusal(0, {}), "the data set is empty"));
}

TEST_CASE("next() begins no epoch that other ranks begin at another step", "[loader]") {
  // 2 full batches of 4 on each rank, and a third for rank 0 alone.
  auto dataset = std::make_shared<Numbers>(17);
  const auto loader_of = [&](int rank, bool pad) {
    return std::make_unique<NumberLoader>(dataset, DistributedSampler(17, rank, 2, {.pad = pad}),
                                          kCpu, ddp::LoaderOptions{.batch_size = 4});
  };
  for (const int rank : {0, 1}) {
    const int64_t own_batches = rank == 0 ? 3 : 2;
    auto loader = loader_of(rank, false);
    for (int64_t b = 0; b < own_batches; ++b) {
      (void)loader->next();
    }
    const auto refusal = message_of<ddp::SettingsError>([&] { loader->next(); });
    INFO(refusal);
    REQUIRE(contains(refusal, "samples for 1 of 2 ranks"));
    REQUIRE(contains(refusal, "sampler.pad=false"));
    loader->begin_epoch(1);  // the program knows where it is
    (void)loader->next();
    const auto state = loader->state_dict();
    auto resumed = loader_of(rank, false);
    resumed->load_state_dict(state);
    for (int64_t b = 1; b < own_batches; ++b) {
      (void)resumed->next();
    }
    REQUIRE_THROWS_AS(resumed->next(), ddp::SettingsError);
    {
      const torch::NoGradGuard evaluates;  // no rank waits for another one's step
      for (int b = 0; b < 7; ++b) {
        (void)resumed->next();
      }
    }
    // Resumed where one sample is left, which rank 0 gets.
    auto moved = loader_of(rank, false);
    auto place = state;
    place.values["position"] = int64_t{16};
    moved->load_state_dict(place);
    if (rank == 0) {
      (void)moved->next();
    }
    REQUIRE_THROWS_AS(moved->next(), ddp::SettingsError);
    for (int epoch = 2; epoch < 4; ++epoch) {  // a loop over batches ends with the epoch
      for (auto& batch : *loader) {
        (void)batch;
      }
    }
    auto padded = loader_of(rank, true);
    for (int b = 0; b < 7; ++b) {
      (void)padded->next();
    }
    REQUIRE(padded->epoch() == 2);
  }
}

TEST_CASE("evaluation sees each sample once over all ranks", "[loader]") {
  for (int64_t size : {1, 10, 13, 32}) {
    for (int world_size : {1, 2, 3, 4}) {
      std::multiset<int64_t> seen;
      for (int rank = 0; rank < world_size; ++rank) {
        auto dataset = std::make_shared<Numbers>(size);
        DistributedSampler sampler(size, rank, world_size, ddp::eval_sampler_options({}));
        NumberLoader loader(dataset, sampler, kCpu,
                            ddp::eval_loader_options(
                                {.batch_size = 3, .global_batch_size = 64, .drop_last = true}));
        for (int round = 0; round < 2; ++round) {
          const auto indices = indices_of(loader);
          REQUIRE(indices == sampler.indices());
          seen.insert(indices.begin(), indices.end());
        }
      }
      REQUIRE(static_cast<int64_t>(seen.size()) == 2 * size);
      REQUIRE(static_cast<int64_t>(std::set<int64_t>(seen.begin(), seen.end()).size()) == size);
    }
  }
}

TEST_CASE("a global batch holds the same samples at any world size", "[loader]") {
  const int64_t size = 50, global = 7;
  DistributedSampler whole(size, 0, 1);
  for (int world_size : {1, 2, 3, 4, 7}) {
    std::vector<std::multiset<int64_t>> batches;
    size_t most = 0, least = 99;
    for (int rank = 0; rank < world_size; ++rank) {
      NumberLoader loader(std::make_shared<Numbers>(size),
                          DistributedSampler(size, rank, world_size), kCpu,
                          {.global_batch_size = global});
      const auto own = next_batches(loader, 7);
      batches.resize(own.size());
      for (size_t b = 0; b < own.size(); ++b) {
        most = std::max(most, own[b].size());
        least = std::min(least, own[b].size());
        batches[b].insert(own[b].begin(), own[b].end());
      }
    }
    REQUIRE(most - least <= 1);
    for (size_t b = 0; b < batches.size(); ++b) {
      std::multiset<int64_t> expected;
      for (int64_t place = 0; place < global; ++place) {
        expected.insert(whole.index_at(static_cast<int64_t>(b) * global + place));
      }
      REQUIRE(batches[b] == expected);
    }
  }
  REQUIRE(contains(message_of<ddp::SettingsError>([&] {
                     NumberLoader(std::make_shared<Numbers>(size), DistributedSampler(size, 0, 8),
                                  kCpu, {.global_batch_size = 7});
                   }),
                   "loader.global_batch_size=7 is smaller than the 8 ranks"));
}

TEST_CASE("a loader resumes at the consumed batch, not at the prefetched one", "[loader]") {
  const int64_t num_workers = GENERATE(0, 2);
  auto make = [&](int rank, int world_size, int64_t batch_size) {
    return std::make_unique<NumberLoader>(
        std::make_shared<Numbers>(40), DistributedSampler(40, rank, world_size, {.seed = 2}), kCpu,
        LoaderOptions{.batch_size = batch_size, .num_workers = num_workers, .prefetch_batches = 3});
  };
  for (int consumed : {0, 1, 3, 5, 7, 10, 12}) {
    auto loader = make(1, 2, 4);
    for (int i = 0; i < consumed; ++i) {
      (void)loader->next();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // let the workers run ahead
    auto resumed = make(1, 2, 4);
    resumed->load_state_dict(loader->state_dict());
    REQUIRE(resumed->state_name() == "loader");
    for (int i = 0; i < 8; ++i) {
      const auto a = loader->next(), b = resumed->next();
      REQUIRE(a.indices == b.indices);
      REQUIRE(a.epoch == b.epoch);
    }
  }
  // 4 -> 2 ranks in the middle of epoch 1: each remaining sample is seen once.
  std::set<int64_t> seen;
  ddp::StateDict state;
  for (int rank = 0; rank < 4; ++rank) {
    auto loader = make(rank, 4, 2);
    loader->begin_epoch(1);
    for (int i = 0; i < 2; ++i) {
      for (int64_t index : loader->next().indices) {
        REQUIRE(seen.insert(index).second);
      }
    }
    state = loader->state_dict();
  }
  for (int rank = 0; rank < 2; ++rank) {
    auto loader = make(rank, 2, 6);
    loader->load_state_dict(state);
    for (int64_t index : indices_of(*loader)) {
      REQUIRE(seen.insert(index).second);
    }
    REQUIRE(loader->epoch() == 2);
  }
  REQUIRE(seen.size() == 40);
}

TEST_CASE("the state of another data set or order is refused and changes nothing", "[loader]") {
  NumberLoader loader(std::make_shared<Numbers>(40), DistributedSampler(40, 0, 1), kCpu,
                      {.batch_size = 4});
  (void)loader.next();
  const auto good = loader.state_dict();
  auto error = [&](const ddp::StateDict& state) {
    return message_of<ddp::MismatchError>([&] { loader.load_state_dict(state); });
  };
  auto changed = good;
  changed.values["size"] = int64_t{41};
  REQUIRE(contains(error(changed), "size was 41 and now is 40"));
  changed = good;
  changed.values["seed"] = int64_t{1};
  REQUIRE(contains(error(changed), "seed was 1 and now is 0"));
  changed = good;
  changed.values.erase("position");
  REQUIRE(contains(error(changed), "key position is missing"));
  changed = good;
  changed.values["colour"] = true;
  REQUIRE(contains(error(changed), "key colour is unexpected"));
  changed = good;
  changed.values["epoch"] = 1.0;
  REQUIRE(contains(error(changed), "key epoch has another type"));
  REQUIRE((loader.state_dict().values == good.values));
}

TEST_CASE("an exception of a sample reaches the caller with its index", "[loader]") {
  const int64_t num_workers = GENERATE(0, 2);
  auto dataset = std::make_shared<Numbers>(64, 37);
  NumberLoader loader(dataset, DistributedSampler(64, 0, 1, {.shuffle = false}), kCpu,
                      {.batch_size = 8, .num_workers = num_workers});
  for (int64_t b = 0; b < 4; ++b) {
    REQUIRE(loader.next().indices.front() == b * 8);
  }
  for (int i = 0; i < 2; ++i) {
    try {
      (void)loader.next();
      FAIL("no error");
    } catch (const ddp::Error& e) {
      REQUIRE(std::string(e.what()) == "broken sample (loading sample 37 of epoch 0)");
      REQUIRE(e.exit_code() == ddp::ExitCode::UserException);
      REQUIRE(message_of<std::out_of_range>([&] { std::rethrow_if_nested(e); }) == "broken sample");
    }
  }
  REQUIRE(loader.position() == 32);  // the failed batch was not consumed
  loader.begin_epoch(0);
  REQUIRE(loader.next().indices.front() == 0);
}

TEST_CASE("a loader prefetches at most prefetch_batches batches", "[loader]") {
  auto dataset = std::make_shared<Numbers>(1000);
  NumberLoader loader(dataset, DistributedSampler(1000, 0, 1), kCpu,
                      {.batch_size = 10, .num_workers = 2, .prefetch_batches = 2});
  for (int64_t b = 1; b <= 10; ++b) {
    (void)loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(dataset->num_read <= (b + 4) * 10);
    for (int i = 0; i < 2000 && dataset->num_read < (b + 1) * 10; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    REQUIRE(dataset->num_read >= (b + 1) * 10);  // the loader reads ahead
  }
  REQUIRE(loader.wait_ms() >= 0);
}

TEST_CASE("the waiting time is measured", "[loader]") {
  struct Slow {
    int64_t size() const { return 8; }
    int get(int64_t) const {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return 0;
    }
  };
  auto collate = [](std::vector<int> items) { return items; };
  DataLoader loader(std::make_shared<Slow>(), DistributedSampler(8, 0, 1), kCpu,
                    {.batch_size = 4, .num_workers = 1}, collate);
  REQUIRE(loader.wait_ms() == 0);
  REQUIRE(loader.next().size() == 4);
  REQUIRE(loader.wait_ms() >= 10);
  REQUIRE(loader.wait_ms() < 30'000);
}

TEST_CASE("loaders with a wrong sampler or impossible settings are refused", "[loader]") {
  auto dataset = std::make_shared<Numbers>(10);
  auto error = [&](const DistributedSampler& sampler, const LoaderOptions& options) {
    return message_of<ddp::SettingsError>([&] { NumberLoader(dataset, sampler, kCpu, options); });
  };
  const DistributedSampler sampler(10, 0, 1);
  REQUIRE(contains(error(DistributedSampler(11, 0, 1), {}), "11 samples, but the data set has 10"));
  REQUIRE(contains(error(sampler, {.batch_size = 0}), "loader.batch_size=0"));
  REQUIRE(contains(error(sampler, {.batch_size = -3}), "loader.batch_size=-3"));
  REQUIRE(contains(error(sampler, {.num_workers = -1}), "loader.num_workers=-1"));
  REQUIRE(contains(error(sampler, {.prefetch_batches = 0}), "loader.prefetch_batches=0"));
}

TEST_CASE("workers run each op on one thread, other threads as before", "[loader]") {
  struct Threads {
    int64_t size() const { return 8; }
    torch::Tensor get(int64_t) const { return torch::tensor(at::get_num_threads()); }
  };
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const auto stack = [](const std::vector<torch::Tensor>& counts) { return torch::stack(counts); };
  for (const int64_t num_workers : {0, 2}) {
    DataLoader loader(std::make_shared<Threads>(), DistributedSampler(8, 0, 1), kCpu,
                      {.batch_size = 8, .num_workers = num_workers}, stack);
    CHECK(torch::equal(loader.next(), torch::full({8}, num_workers == 0 ? 2 : 1)));
  }
  int later = 0;
  std::thread([&] { later = at::get_num_threads(); }).join();
  CHECK(later == 2);
  CHECK(at::get_num_threads() == 2);
  at::set_num_threads(before);
}
