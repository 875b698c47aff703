// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <type_traits>

#include "ddp/data/distributed_sampler.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"

using data_test::contains;
using data_test::message_of;
using ddp::DistributedSampler;
using ddp::SamplerOptions;

namespace {

// The hash of tests/golden/make_sampler_golden.py.
uint64_t digest(const std::vector<int64_t>& indices) {
  const uint64_t prime = (uint64_t{1} << 61) - 1;
  uint64_t value = 0;
  for (int64_t i : indices) {
    value = static_cast<uint64_t>(
        (static_cast<unsigned __int128>(value) * 1'000'003 + static_cast<uint64_t>(i) + 1) % prime);
  }
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

std::map<int64_t, int> count_over_ranks(int64_t size, int world_size,
                                        const SamplerOptions& options) {
  std::map<int64_t, int> count;
  for (int rank = 0; rank < world_size; ++rank) {
    for (int64_t index : DistributedSampler(size, rank, world_size, options).indices()) {
      ++count[index];
    }
  }
  return count;
}

// Indices that the ranks take from here on through next(), in the order of positions.
std::vector<int64_t> take(std::vector<DistributedSampler>& ranks, int64_t batch_size) {
  std::vector<std::vector<size_t>> parts;
  for (auto& sampler : ranks) {
    parts.push_back(sampler.next(static_cast<size_t>(batch_size)).value_or(std::vector<size_t>{}));
  }
  std::vector<int64_t> places;
  for (size_t i = 0; i < static_cast<size_t>(batch_size); ++i) {
    for (const auto& part : parts) {
      if (i < part.size()) {
        places.push_back(static_cast<int64_t>(part[i]));
      }
    }
  }
  return places;
}

std::vector<DistributedSampler> make_ranks(int64_t size, int world_size,
                                           const SamplerOptions& options) {
  std::vector<DistributedSampler> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back(size, rank, world_size, options);
  }
  return ranks;
}

}  // namespace

TEST_CASE("the sampler equals PyTorch's, index for index", "[sampler]") {
  std::ifstream golden(DDP_SOURCE_DIR "/tests/golden/sampler_golden.csv");
  REQUIRE(golden);
  int num_rows = 0;
  for (std::string line; std::getline(golden, line);) {
    if (line.starts_with("#")) {
      continue;
    }
    const auto column = split(line, ',');
    REQUIRE(column.size() == 10);
    const SamplerOptions options{
        .shuffle = column[3] == "1", .seed = std::stoll(column[5]), .drop_last = column[4] == "1"};
    DistributedSampler sampler(std::stoll(column[0]), std::stoi(column[2]), std::stoi(column[1]),
                               options);
    sampler.set_epoch(std::stoll(column[6]));
    const auto indices = sampler.indices();
    INFO(line);
    REQUIRE(sampler.num_samples() == std::stoll(column[7]));
    REQUIRE(static_cast<int64_t>(indices.size()) == sampler.num_samples());
    const auto head = split(column[8], ' ');
    for (size_t i = 0; i < head.size(); ++i) {
      REQUIRE(indices.at(i) == std::stoll(head[i]));
    }
    REQUIRE(digest(indices) == std::stoull(column[9]));
    ++num_rows;
  }
  REQUIRE(num_rows > 1000);
}

TEST_CASE("without padding each sample is seen once and ranks differ by at most one", "[sampler]") {
  const bool shuffle = GENERATE(false, true);
  for (int64_t size : {0, 1, 3, 10, 17, 64}) {
    for (int world_size : {1, 2, 3, 5, 8}) {
      const SamplerOptions options{.shuffle = shuffle, .pad = false};
      const auto count = count_over_ranks(size, world_size, options);
      REQUIRE(static_cast<int64_t>(count.size()) == size);
      REQUIRE(std::all_of(count.begin(), count.end(), [](auto& c) { return c.second == 1; }));
      const auto most = DistributedSampler(size, 0, world_size, options).num_samples();
      const auto least =
          DistributedSampler(size, world_size - 1, world_size, options).num_samples();
      REQUIRE(most - least <= 1);
    }
  }
}

TEST_CASE("epochs and seeds change the order, and the same epoch repeats it", "[sampler]") {
  DistributedSampler sampler(100, 1, 4);
  const auto first = sampler.indices();
  sampler.set_epoch(1);
  REQUIRE(sampler.indices() != first);
  sampler.set_epoch(0);
  REQUIRE(sampler.indices() == first);
  REQUIRE(DistributedSampler(100, 1, 4, {.seed = 1}).indices() != first);
  // PyTorch adds seed and epoch.
  sampler.set_epoch(1);
  REQUIRE(DistributedSampler(100, 1, 4, {.seed = 1}).indices() == sampler.indices());
}

TEST_CASE("the sampler implements LibTorch's interface", "[sampler]") {
  STATIC_REQUIRE(std::is_base_of_v<torch::data::samplers::Sampler<>, DistributedSampler>);
  DistributedSampler sampler(11, 1, 3);
  std::vector<int64_t> seen;
  while (auto batch = sampler.next(3)) {
    seen.insert(seen.end(), batch->begin(), batch->end());
  }
  REQUIRE(seen == sampler.indices());
  REQUIRE(sampler.position() == sampler.total_size());
  sampler.reset();
  REQUIRE(sampler.position() == 0);
  REQUIRE(sampler.next(100)->size() == 4);
  sampler.reset(30);
  REQUIRE(sampler.next(100)->size() == 10);

  sampler.set_epoch(3);
  (void)sampler.next(4);
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler restored(30, 1, 3);
  restored.load(in);
  REQUIRE(restored.epoch() == 3);
  REQUIRE(restored.position() == 12);
  REQUIRE(restored.next(6) == sampler.next(6));
}

TEST_CASE("a loader of torch::data sees another order in each epoch", "[sampler]") {
  struct Numbers : torch::data::datasets::Dataset<Numbers, int64_t> {
    int64_t get(size_t index) override { return static_cast<int64_t>(index); }
    std::optional<size_t> size() const override { return 20; }
  };
  DistributedSampler expected(20, 1, 2, {.seed = 5});
  DistributedSampler sampler(20, 1, 2, {.seed = 5});
  sampler.set_epoch(3);
  sampler.set_position(8);
  auto loader = torch::data::make_data_loader(Numbers(), sampler, /*batch_size=*/4);
  for (int64_t epoch = 3; epoch < 6; ++epoch) {
    std::vector<int64_t> seen;
    for (const std::vector<int64_t>& batch : *loader) {
      seen.insert(seen.end(), batch.begin(), batch.end());
    }
    expected.set_epoch(epoch);
    auto wanted = expected.indices();
    if (epoch == 3) {  // resumed after 8 samples of 2 ranks
      wanted.erase(wanted.begin(), wanted.begin() + 4);
    }
    CAPTURE(epoch);
    REQUIRE(seen == wanted);
  }
}

TEST_CASE("resetting a sampler starts the next epoch if samples were taken", "[sampler]") {
  DistributedSampler sampler(10, 0, 1);
  sampler.reset();
  REQUIRE(sampler.epoch() == 0);
  (void)sampler.next(3);
  sampler.reset();
  REQUIRE(sampler.epoch() == 1);
  REQUIRE(sampler.position() == 0);
  REQUIRE(sampler.next(10)->size() == 10);
  sampler.reset(12);
  REQUIRE(sampler.epoch() == 2);
  REQUIRE(sampler.indices() != DistributedSampler(12, 0, 1).indices());
  // A rank without samples counts like the others.
  DistributedSampler empty(2, 3, 4, {.pad = false});
  REQUIRE_FALSE(empty.next(1));
  empty.reset();
  REQUIRE(empty.epoch() == 1);
}

TEST_CASE("an epoch continues where it stopped, also at another world size", "[sampler]") {
  const SamplerOptions options{.seed = 3};
  const int64_t size = 48;
  auto whole = make_ranks(size, 1, options);
  const auto order = take(whole, size);
  for (int before : {1, 2, 4}) {
    for (int after : {1, 2, 3, 4}) {
      auto ranks = make_ranks(size, before, options);
      auto seen = take(ranks, 3);
      const int64_t position = ranks[0].position();
      REQUIRE(position == 3 * before);
      auto resumed = make_ranks(size, after, options);
      for (auto& sampler : resumed) {
        sampler.set_position(position);
      }
      const auto rest = take(resumed, size);
      seen.insert(seen.end(), rest.begin(), rest.end());
      REQUIRE(seen.size() >= order.size());
      seen.resize(order.size());  // the rest: fewer than `after` repeated samples
      REQUIRE(seen == order);
    }
  }
}

TEST_CASE("impossible samplers are refused by name", "[sampler]") {
  REQUIRE_THROWS_AS(DistributedSampler(10, 3, 3), ddp::SettingsError);
  REQUIRE_THROWS_AS(DistributedSampler(10, -1, 3), ddp::SettingsError);
  REQUIRE_THROWS_AS(DistributedSampler(-1, 0, 1), ddp::SettingsError);
  REQUIRE_THROWS_AS(DistributedSampler(10, 0, 1).set_epoch(-1), ddp::SettingsError);
  const auto message = message_of<ddp::SettingsError>([] { DistributedSampler(10, 4, 2); });
  REQUIRE(contains(message, "rank is 4 of world_size 2"));
}
