// SPDX-License-Identifier: Apache-2.0
// Chooses how a DataLoader makes the batches of the library's data sets:
//
//   make_resident_images()                 decoded images that fit in GPU memory
//   PrefetchSource of a RegionBuilder      JPEG images that the GPU resizes
//                  of a DirectBuilder      examples of one shape, written straight into the batch
//                  of a CollatingBuilder   other examples, stacked
#include <ATen/ops/stack.h>

#include "data/batch_memory.hpp"
#include "data/device_builder.hpp"
#include "data/direct_builder.hpp"
#include "data/resident_images.hpp"
#include "ddp/data/data_loader.hpp"

namespace ddp {

void for_each_tensor(Batch& batch, const TensorVisitor& visit) {
  visit(batch.data);
  visit(batch.target);
}

Batch DefaultCollate::operator()(std::vector<Example> examples) const {
  std::vector<at::Tensor> data, target;
  for (Example& example : examples) {
    data.push_back(std::move(example.data));
    target.push_back(std::move(example.target));
  }
  return {at::stack(data), at::stack(target)};
}

namespace detail {
namespace {

std::unique_ptr<BatchBuilder<Batch>> make_batch_builder(
    const std::shared_ptr<const Dataset>& dataset, const DistributedSampler& sampler,
    at::Device device, const LoaderOptions& options) {
  const int num_slots = LoaderEngine::num_slots(options);
  const int64_t max_batch = EpochBatches(sampler, options).max_size();
  if (auto builder = make_device_builder(dataset, device, options, num_slots, max_batch)) {
    return builder;
  }
  if (dataset->layout()) {
    return std::make_unique<DirectBuilder>(dataset, num_slots, max_batch,
                                           uses_pinned_memory(device, options));
  }
  return std::make_unique<CollatingBuilder<const Dataset, DefaultCollate>>(
      dataset, DefaultCollate(), num_slots);
}

}  // namespace

std::unique_ptr<BatchSource<Batch>> make_batch_source(std::shared_ptr<const Dataset> dataset,
                                                      const DistributedSampler& sampler,
                                                      at::Device device,
                                                      const LoaderOptions& options,
                                                      DefaultCollate /*collate*/) {
  if (keeps_images_on_device(*dataset, device, options)) {
    return make_resident_images(dataset, sampler, device, options);
  }
  const auto to_image_dtype = [dtype = options.image_dtype](Batch& batch) {
    if (dtype != ImageDtype::Auto && batch.data.is_floating_point()) {
      batch.data = batch.data.to(scalar_type(dtype));
    }
  };
  return std::make_unique<PrefetchSource<Batch>>(
      make_batch_builder(dataset, sampler, device, options), sampler, device, options,
      to_image_dtype);
}

}  // namespace detail
}  // namespace ddp
