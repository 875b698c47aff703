// SPDX-License-Identifier: Apache-2.0
// Samples per second of a TensorDataset: images of 784 floats in batches of 256, as whole batches
// and stacked one by one. pytorch_tensors.py measures PyTorch's DataLoader on the same tensors.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "ddp/data/data_loader.hpp"
#include "ddp/data/tensor_dataset.hpp"

namespace {

constexpr int64_t kSamples = 60000;
constexpr int64_t kBatch = 256;

// Median over five epochs, after one.
template <typename Loader>
double samples_per_second(Loader& loader) {
  std::vector<double> rates;
  for (int epoch = 0; epoch < 6; ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    int64_t count = 0;
    for (auto& batch : loader) {
      count += batch.size();
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (epoch > 0) {
      rates.push_back(static_cast<double>(count) / elapsed.count());
    }
  }
  std::sort(rates.begin(), rates.end());
  return rates[2];
}

}  // namespace

int main() {
  const auto dataset = std::make_shared<ddp::TensorDataset>(
      torch::rand({kSamples, 784}), torch::randint(10, {kSamples}, torch::kLong));
  const ddp::DistributedSampler sampler(kSamples, 0, 1);
  for (const int64_t num_workers : {0, 1, 2}) {
    const ddp::LoaderOptions options{.batch_size = kBatch, .num_workers = num_workers};
    ddp::DataLoader whole(dataset, sampler, at::kCPU, options);
    std::printf("%d workers, whole batches     %9.0f samples/s\n", static_cast<int>(num_workers),
                samples_per_second(whole));
    ddp::DataLoader stacked(dataset, sampler, at::kCPU, options,
                            [](std::vector<ddp::Example> examples) {
                              return ddp::DefaultCollate()(std::move(examples));
                            });
    std::printf("%d workers, sample by sample  %9.0f samples/s\n", static_cast<int>(num_workers),
                samples_per_second(stacked));
  }
}
