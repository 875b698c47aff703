// SPDX-License-Identifier: Apache-2.0
// Batches of a set of small images that lies in GPU memory as a whole: one kernel a batch, no copy
// and no wait of the host. DataLoader uses it by itself (loader.device_resident); use it directly
// to make batches inside a CUDA graph:
//
//   ddp::DeviceImageLoader loader(dataset, sampler, ctx.device(), cfg.loader);
//   ddp::Batch batch = loader.make_buffers();
//   capture { loader.enqueue(batch); step(batch); }
//   for (…) { loader.prepare(); graph.replay(); }
//
// A sample is what the CPU's path makes of (seed, epoch, index): the same float, then rounded to
// the nearest of `image_dtype`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/data/batch.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/data/loader_engine.hpp"
#include "ddp/data/options.hpp"

namespace ddp {

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

  /// The next batch, in memory that is the caller's, made on the current stream.
  Batch next();

  /// Of a batch made by enqueue(): [samples, 3, side, side] and [samples], for the largest batch.
  Batch make_buffers() const;
  /// The host's part of a batch, once before each enqueue() that runs or is replayed: the number of
  /// its samples. Uploads the order where an epoch begins. Returns at once; never inside a capture.
  int64_t prepare();
  /// The device's part: fills `batch`, of as many samples as prepare() said, on the current stream.
  /// May be captured; the position is in device memory, so that each replay gives the batch after
  /// the last one's.
  void enqueue(Batch& batch);

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
