// SPDX-License-Identifier: Apache-2.0
// Batches of small images that are all in GPU memory: one kernel per batch, no copy, no host wait.
// DataLoader uses this class automatically (loader.device_resident). DataLoader::device_images()
// makes batches inside a captured step:
//
//   ddp::GraphedStep step(ctx, parts, [&](const ddp::PreparedBatch& prepared, …) {
//     const ddp::Batch batch = images.make(prepared);
//     …
//   });
//   for (…) { step(images.prepare(), numbers); }
//
// A sample equals the CPU path's for (seed, epoch, index): the same float, rounded to
// `image_dtype`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/options.hpp"
#include "ddp/detail/batch_source.hpp"

namespace ddp {

/// A batch that the host has chosen and the device has not made yet. A GraphedStep uploads its
/// place with the step's numbers, and captures one graph per size.
struct PreparedBatch {
  at::Tensor place;  ///< two int32 in the bits of float32 [2]: place in the order, epoch
  int64_t size = 0;  ///< samples
};
inline void for_each_tensor(PreparedBatch& batch, const TensorVisitor& visit) {
  visit(batch.place);
  visit(batch.size);
}

class DeviceImageLoader : public detail::BatchSource<Batch> {
 public:
  /// Copies the images to `device`. Throws SettingsError where why_not() returns a reason.
  DeviceImageLoader(const std::shared_ptr<const Dataset>& dataset,
                    const DistributedSampler& sampler, at::Device device,
                    const LoaderOptions& options);
  ~DeviceImageLoader() override;

  /// Why `dataset` cannot be kept on `device`; empty if it can. Ignores size limits.
  static std::string why_not(const Dataset& dataset, at::Device device);
  /// Whether a DataLoader with these options uses this class. Throws SettingsError if
  /// device_resident=on is impossible.
  static bool is_chosen(const Dataset& dataset, at::Device device, const LoaderOptions& options);

  /// Makes the next batch on the current stream, in memory that the caller owns. If this throws
  /// (out of memory), the next call returns the same batch.
  Batch next() override;

  /// The host's part of next(): counts the batch as consumed and, at the start of an epoch, uploads
  /// the order on the current stream. Not inside a capture. Up to one epoch of batches may be
  /// prepared before they are made.
  PreparedBatch prepare();
  /// The device's part, on the current stream. May be captured in a graph that this object
  /// outlives: each replay makes the batch at the device's current value of `place`.
  Batch make(const PreparedBatch& prepared) const;

  void restart(detail::LoaderPlace place) override;
  detail::LoaderPlace place() const override;
  double wait_ms() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp
