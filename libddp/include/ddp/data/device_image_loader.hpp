// SPDX-License-Identifier: Apache-2.0
// Batches of a set of small images that lies in GPU memory as a whole: one kernel a batch, no copy
// and no wait of the host. DataLoader uses it by itself (loader.device_resident); use it directly
// (DataLoader::device_images()) to make batches inside a captured step:
//
//   ddp::GraphedStep step(ctx, parts,
//                         [&](const ddp::PreparedBatch& prepared, const ddp::StepScalars& scalars)
//                         {
//                           const ddp::Batch batch = images.make(prepared);
//                           …
//                         });
//   for (…) { step(images.prepare(), numbers); }
//
// A sample is what the CPU's path makes of (seed, epoch, index): the same float, then rounded to
// the nearest of `image_dtype`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/core/visit_tensors.hpp"
#include "ddp/data/batch.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/loader_engine.hpp"
#include "ddp/data/options.hpp"

namespace ddp {

/// A batch of which the host has said which one it is, and which the device has yet to make. In a
/// GraphedStep its place travels with the step's numbers; each size has a graph of its own.
struct PreparedBatch {
  at::Tensor place;  ///< two int32 in the bits of float32 [2]: where in the order, which epoch
  int64_t size = 0;  ///< samples
};
inline void for_each_tensor(PreparedBatch& batch, const TensorVisitor& visit) {
  visit(batch.place);
  visit(batch.size);
}

class DeviceImageLoader : public detail::LoaderPlace {
 public:
  /// Copies the images to `device`. Throws SettingsError where why_not() has something to say.
  DeviceImageLoader(const std::shared_ptr<const Dataset>& dataset,
                    const DistributedSampler& sampler, at::Device device,
                    const LoaderOptions& options);
  ~DeviceImageLoader() override;

  /// Why `dataset` cannot lie on `device`; empty where it can. Size limits are not looked at.
  static std::string why_not(const Dataset& dataset, at::Device device);
  /// Whether a DataLoader with these options uses this class. Throws SettingsError where
  /// device_resident=on cannot be.
  static bool is_chosen(const Dataset& dataset, at::Device device, const LoaderOptions& options);

  /// The next batch, in memory that is the caller's, made on the current stream. Where that throws
  /// (out of memory), the next call gives the same batch.
  Batch next();

  /// The host's part of next(): the batch counts as consumed. Uploads the order on the current
  /// stream where an epoch begins, and waits there for the thread that makes the order where it is
  /// not done yet; else it returns at once. Never inside a capture. Batches of up to one epoch may
  /// be prepared before they are made.
  PreparedBatch prepare();
  /// The device's part, on the current stream; may be captured, in a graph that this object
  /// outlives. Each replay makes the batch that `place`, in memory of the device, then tells of:
  /// GraphedStep sees to it.
  Batch make(const PreparedBatch& prepared) const;

  int64_t epoch() const override;
  int64_t position() const override;
  int64_t num_batches() const override;
  int64_t batches_left() const override;
  double wait_ms() const override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;
  void restart(int64_t epoch, int64_t position) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp
