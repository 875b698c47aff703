// SPDX-License-Identifier: Apache-2.0
#include "ddp/data/data_loader.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace {

using ddp::DataLoader;

struct Sample {
  at::Tensor features;
};

struct Samples {
  int64_t size() const { return 4; }
  Sample get(int64_t) const { return {}; }
};

struct WithoutSize {
  ddp::Example get(int64_t) const { return {}; }
};

struct WithoutGet {
  int64_t size() const { return 4; }
};

struct NotConst {
  int64_t size() const { return 4; }
  ddp::Example get(int64_t) { return {}; }
};

struct BatchWithoutTensors {
  at::Tensor features;
};

struct WholeBatches {
  int64_t size() const { return 4; }
  std::optional<BatchWithoutTensors> get_batch(const std::vector<int64_t>&) const { return {}; }
};

struct BatchOfNothing {
  int64_t size() const { return 4; }
  void get_batch(const std::vector<int64_t>&) const {}
  ddp::Example get(int64_t) const { return {}; }
};

struct SampleOfNothing {
  int64_t size() const { return 4; }
  void get(int64_t) const {}
};

struct IgnoredEpochs {
  int64_t size() const { return 4; }
  ddp::Batch get_batch(const std::vector<int64_t>&) const { return {}; }
  ddp::Example get_for_epoch(int64_t, int64_t) const { return {}; }
};

struct IgnoredEpochsOfDataset : ddp::Dataset {
  int64_t size() const override { return 4; }
  ddp::Example get(int64_t) const override { return {}; }
  ddp::Example get_for_epoch(int64_t, int64_t) const override { return {}; }
  ddp::Batch get_batch(const std::vector<int64_t>&) const { return {}; }
};

BatchWithoutTensors collate(const std::vector<Sample>&) {
  return {};
}

}  // namespace

void load_wrong_data(const ddp::DistributedSampler& sampler) {
  // error: a data set for ddp::DataLoader needs int64_t size() const, its number of samples
  DataLoader without_size(std::make_shared<WithoutSize>(), sampler, at::kCPU);
  without_size.next();

  // error: a data set for ddp::DataLoader needs get(int64_t index), get_for_epoch(index, epoch) or
  DataLoader without_get(std::make_shared<WithoutGet>(), sampler, at::kCPU);
  without_get.next();
  // error: a data set for ddp::DataLoader needs get(int64_t index), get_for_epoch(index, epoch) or
  DataLoader not_const(std::make_shared<const NotConst>(), sampler, at::kCPU);

  // error: ddp::DataLoader needs a collate function for samples that are not ddp::Example
  DataLoader without_collate(std::make_shared<Samples>(), sampler, at::kCPU);
  without_collate.next();

  // error: the collate function of a ddp::DataLoader must take a std::vector of what the data set's
  DataLoader other_samples(std::make_shared<Samples>(), sampler, at::kCPU, {},
                           [](const std::vector<at::Tensor>& samples) { return samples; });

  // error: the collate function of a ddp::DataLoader must return the batch
  DataLoader without_batch(std::make_shared<Samples>(), sampler, at::kCPU, {},
                           [](const std::vector<Sample>&) {});

  // error: ddp::DataLoader does not know the tensors of its batches: define for_each_tensor(
  DataLoader without_tensors(std::make_shared<Samples>(), sampler, at::kCPU, {}, collate);
  without_tensors.next();
  // error: ddp::DataLoader does not know the tensors of its batches: define for_each_tensor(
  DataLoader list_of_samples(std::make_shared<Samples>(), sampler, at::kCPU, {},
                             [](const std::vector<Sample>& samples) { return samples; });
  // error: ddp::DataLoader does not know the tensors of its batches: define for_each_tensor(
  DataLoader whole_batches(std::make_shared<WholeBatches>(), sampler, at::kCPU);

  // error: get_batch() of a data set for ddp::DataLoader must return the batch
  DataLoader batch_of_nothing(std::make_shared<BatchOfNothing>(), sampler, at::kCPU);
  batch_of_nothing.next();
  // error: get() or get_for_epoch() of a data set for ddp::DataLoader must return the sample
  DataLoader sample_of_nothing(std::make_shared<SampleOfNothing>(), sampler, at::kCPU);
  sample_of_nothing.next();
  // error: a data set for ddp::DataLoader has get_batch(), which knows no epoch, or get_for_epoch()
  DataLoader ignored_epochs(std::make_shared<IgnoredEpochs>(), sampler, at::kCPU);
  ignored_epochs.next();
  // error: a data set for ddp::DataLoader has get_batch(), which knows no epoch, or get_for_epoch()
  DataLoader of_dataset(std::make_shared<const IgnoredEpochsOfDataset>(), sampler, at::kCPU);
}
