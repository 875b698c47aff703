// SPDX-License-Identifier: Apache-2.0
// See kUsage. pytorch_tensors.py measures PyTorch's DataLoader on the same tensors.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "ddp/data/data_loader.hpp"
#include "ddp/data/tensor_dataset.hpp"
#include "ddp/train/command_line.hpp"

namespace {

constexpr char kUsage[] =
    "usage: bench_tensors\n\n"
    "Samples per second of a TensorDataset with 0, 1 and 2 workers: 784 floats each, in batches "
    "of\n"
    "256 that are loaded whole and stacked sample by sample.\n";
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

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
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
