// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/train/graphed_step.hpp"
#include "train/step_ring.hpp"

namespace ddp {

/// A memory pool of the allocator that captures draw from.
class GraphPool {
 public:
  using Id = std::pair<unsigned long long, unsigned long long>;
  /// Of the graphs that hold it; where none does any more, a new one: the allocators refuse a pool
  /// that was given up, also where tensors or their own bookkeeping keep it.
  std::shared_ptr<const Id> id();

 private:
  std::weak_ptr<const Id> id_;
};

namespace detail {

/// The device's copy of a step's numbers: [0] lr, [1] step, then what small tensors of the batch
/// hold.
class StepFeed {
 public:
  static constexpr int kLr = 0;
  static constexpr int kStep = 1;
  static constexpr int kFirstFree = 2;

  explicit StepFeed(at::Device device);
  at::Tensor number(int index) const { return numbers_.select(0, index); }
  /// `count` numbers from `index` on, as a tensor of the same sizes as `like`.
  at::Tensor numbers_like(const at::Tensor& like, int index) const;
  const uint64_t* sequence() const;

 private:
  friend class CapturedStep;
  friend void feed_eagerly(const StepFeed&, const StepNumbers&, uint64_t,
                           const std::vector<at::Tensor*>&);

  at::Tensor memory_;   // sequence, then numbers
  at::Tensor numbers_;  // float32 [kMaxFeedNumbers]
};

/// The numbers of an eager step: small float32 tensors of the CPU among `inputs` become views of
/// the feed; others stay as they are.
void feed_eagerly(const StepFeed& feed, const StepNumbers& numbers, uint64_t sequence,
                  const std::vector<at::Tensor*>& inputs);

/// One graph with its own inputs.
class CapturedStep {
 public:
  struct Request {
    const StepFeed& feed;
    const StepRing& ring;
    GraphPool& pool;
    const std::vector<at::Generator>& generators;
    StepCall& call;
    uint64_t sequence;
    const std::function<void()>& at_end;  ///< captured behind the step, where it did not throw
    int64_t step_bytes;                   ///< what an eager step took at its peak; 0: not known
  };

  /// Captures request.call.run on its inputs, which become this graph's. Executes nothing. Throws
  /// what the step throws; failing_operation() then names where.
  static std::unique_ptr<CapturedStep> capture(const Request& request, std::string* failing);
  ~CapturedStep();

  /// After all ranks have captured.
  void instantiate();
  /// Enqueues one step on `inputs`, which look like those it was captured on.
  void replay(const StepNumbers& numbers, uint64_t sequence,
              const std::vector<at::Tensor*>& inputs);

  const std::shared_ptr<const void>& object() const { return object_; }
  int num_scalars() const { return num_scalars_; }
  int64_t num_nodes() const;

 private:
  CapturedStep();
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::shared_ptr<const void> object_;
  int num_scalars_ = 0;
};

/// How much memory tensors take at the most from here on, beyond those that there are now or at the
/// end: state that a step makes stays. Begins the allocator's own statistics of peaks anew.
class PeakBytes {
 public:
  explicit PeakBytes(at::Device device);
  int64_t taken() const;

 private:
  const at::Device device_;
  const int64_t before_;
};

/// What the current stream's segments of a pool ({0, 0}: that of eager steps) lack of `bytes`; 0
/// where the device has not that much.
int64_t missing_bytes(at::Device device, GraphPool::Id pool, int64_t bytes);
/// Into the allocator's cache, for the current stream, where there is that much. A tensor that gets
/// a block of its own from the device leaves one that fits no larger tensor, and those of a
/// backward go from small to large: piece by piece a step keeps a fifth more than it has at a time.
void take_as_one_block(int64_t bytes, at::Device device);

/// Before captures: what eager steps left in the allocator's cache goes back to the device.
void free_cached_memory();
/// Throws where the device is in error; never waits.
void check_device(at::Device device);
/// The current stream is one that can be captured.
bool stream_can_be_captured(at::Device device);

}  // namespace detail
}  // namespace ddp
