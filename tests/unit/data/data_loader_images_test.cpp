// SPDX-License-Identifier: Apache-2.0
// The loader with ddp::Dataset: image batches and their memory.
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/sources/cifar10_sample.hpp"

using data_test::kCpu;
using data_test::kSample;
using ddp::DataLoader;
using ddp::DistributedSampler;

TEST_CASE("image batches have the same bits at any number of workers and ranks", "[loader]") {
  const bool channels_last = GENERATE(false, true);
  const auto augment = GENERATE(ddp::Augment::PadCrop, ddp::Augment::RandomResizedCrop);
  auto dataset = ddp::make_dataset({.path = kSample,
                                    .num_samples = 96,
                                    .augment = augment,
                                    .cutout = 6,
                                    .channels_last = channels_last});
  auto batches = [&](int64_t num_workers, int world_size) {
    std::vector<torch::Tensor> data(2), target(2);
    std::vector<std::vector<ddp::Batch>> parts(2);
    for (int rank = 0; rank < world_size; ++rank) {
      DistributedSampler sampler(96, rank, world_size);
      DataLoader loader(dataset, sampler, kCpu,
                        {.batch_size = 48 / world_size, .num_workers = num_workers});
      loader.begin_epoch(3);
      for (auto& part : parts) {
        part.push_back(loader.next());
      }
    }
    for (size_t b = 0; b < 2; ++b) {
      std::vector<torch::Tensor> d, t;
      for (auto& part : parts[b]) {
        d.push_back(part.data);
        t.push_back(part.target);
      }
      data[b] = torch::stack(d, 1).flatten(0, 1);  // rank r holds positions r, r + N, …
      target[b] = torch::stack(t, 1).flatten(0, 1);
    }
    return std::pair{torch::cat(data), torch::cat(target)};
  };
  const auto [data, target] = batches(0, 1);
  REQUIRE(data.sizes() == at::IntArrayRef({96, 3, 32, 32}));
  REQUIRE(target.dtype() == torch::kInt64);
  for (auto [num_workers, world_size] :
       {std::pair{1, 1}, std::pair{4, 1}, std::pair{2, 2}, std::pair{0, 4}}) {
    const auto [other_data, other_target] = batches(num_workers, world_size);
    REQUIRE(torch::equal(data, other_data));
    REQUIRE(torch::equal(target, other_target));
  }
  // Compares with get(), example by example.
  DistributedSampler sampler(96, 0, 1);
  sampler.set_epoch(3);
  for (int64_t i = 0; i < 96; ++i) {
    const auto example = dataset->get_for_epoch(sampler.index_at(i), 3);
    REQUIRE(torch::equal(data[i], example.data));
    REQUIRE(target[i].item<int64_t>() == example.target.item<int64_t>());
  }
  DataLoader loader(dataset, sampler, kCpu, {.batch_size = 8});
  const auto format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  REQUIRE(loader.next().data.is_contiguous(format));
}

TEST_CASE("a batch belongs to the training loop: later batches do not change it", "[loader]") {
  auto dataset = ddp::make_dataset({.path = kSample, .num_samples = 64});
  DataLoader loader(dataset, DistributedSampler(64, 0, 1), kCpu,
                    {.batch_size = 8, .prefetch_batches = 1});
  std::vector<ddp::Batch> kept;
  std::vector<torch::Tensor> copies;
  for (int i = 0; i < 20; ++i) {
    kept.push_back(loader.next());
    copies.push_back(kept.back().data.clone());
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(torch::equal(kept[i].data, copies[i]));
  }
  // A view keeps the batch's memory alive.
  const auto view = loader.next().data.select(1, 0);
  const auto copy = view.clone();
  kept.clear();
  for (int i = 0; i < 20; ++i) {
    (void)loader.next();
    REQUIRE(torch::equal(view, copy));
  }
}

TEST_CASE("a ddp::Dataset without a layout is collated by stacking", "[loader]") {
  struct Plain : ddp::Dataset {
    int64_t size() const override { return 10; }
    ddp::Example get(int64_t index) const override {
      return {torch::full({2, 3}, double(index)), torch::tensor(index)};
    }
  };
  std::shared_ptr<ddp::Dataset> dataset = std::make_shared<Plain>();
  DataLoader loader(dataset, DistributedSampler(10, 0, 1, {.shuffle = false}), kCpu,
                    {.batch_size = 4});
  const auto batch = loader.next();
  REQUIRE(batch.size() == 4);
  REQUIRE(torch::equal(batch.target, torch::arange(4)));
  REQUIRE(torch::equal(batch.data.select(1, 0).select(1, 0), torch::arange(4).to(torch::kFloat)));
}
