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

/// An allocator memory pool for captures.
class GraphPool {
 public:
  using Id = std::pair<unsigned long long, unsigned long long>;
  /// The pool of the graphs that hold it. If no graph holds one, a new pool: the allocators refuse
  /// a released pool, even if tensors or their own bookkeeping keep it.
  std::shared_ptr<const Id> id();

 private:
  std::weak_ptr<const Id> id_;
};

namespace detail {

/// The device's copy of a step's numbers: [0] lr, [1] step, then the contents of small tensors of
/// the batch.
class StepFeed {
 public:
  static constexpr int kLr = 0;
  static constexpr int kStep = 1;
  static constexpr int kFirstFree = 2;

  explicit StepFeed(at::Device device);
  at::Tensor number(int index) const { return numbers_.select(0, index); }
  /// The numbers from `index` on, as a tensor with the sizes of `like`.
  at::Tensor numbers_like(const at::Tensor& like, int index) const;
  const uint64_t* sequence() const;

 private:
  friend class CapturedStep;
  friend void feed_eagerly(const StepFeed&, const StepNumbers&, uint64_t,
                           const std::vector<at::Tensor*>&);

  at::Tensor memory_;   // sequence, then numbers
  at::Tensor numbers_;  // float32 [kMaxFeedNumbers]
};

/// Feeds an eager step: small float32 CPU tensors among `inputs` become views of the feed; others
/// stay unchanged.
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
    const std::function<void()>& at_end;  ///< captured after the step, unless it threw
    int64_t step_bytes;                   ///< an eager step's peak memory; 0: not known
  };

  /// Captures request.call.run on its inputs, which become this graph's. Executes nothing. Throws
  /// what the step throws; `failing` then receives the operation.
  static std::unique_ptr<CapturedStep> capture(const Request& request, std::string* failing);
  ~CapturedStep();

  /// Call after all ranks have captured.
  void instantiate();
  /// Enqueues one step on `inputs`, which have the shapes of the captured ones.
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

/// Measures peak tensor memory from here on, beyond the tensors alive at the start or at the end
/// (state made by a step stays). Resets the allocator's peak statistics.
class PeakBytes {
 public:
  explicit PeakBytes(at::Device device);
  int64_t taken() const;

 private:
  const at::Device device_;
  const int64_t before_;
};

/// Bytes that the current stream's segments of a pool ({0, 0}: the pool of eager steps) lack of
/// `bytes`; 0 if the device has less free memory.
int64_t missing_bytes(at::Device device, GraphPool::Id pool, int64_t bytes);
/// Reserves a block in the allocator's cache for the current stream, if the device has the memory.
/// Without it, a tensor gets its own block from the device, which fits no larger tensor. Tensors of
/// a backward grow, so a step would keep a fifth more than its peak memory.
void take_as_one_block(int64_t bytes, at::Device device);

/// Before captures: returns the allocator's cached memory of eager steps to the device.
void free_cached_memory();
/// Throws if the device is in error; never waits.
void check_device(at::Device device);
/// Whether the current stream can be captured.
bool stream_can_be_captured(at::Device device);

}  // namespace detail
}  // namespace ddp
