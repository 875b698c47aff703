// SPDX-License-Identifier: Apache-2.0
// How one bucket of gradients becomes the mean over the ranks. A hook replaces the plain
// all-reduce, for example to compress what travels.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/reduce/ddp_options.hpp"

namespace ddp {

/// A bucket as a hook sees it.
struct GradBucket {
  int index = 0;         ///< in launch order
  bool is_last = false;  ///< the last one of this backward
  bool is_tail = false;  ///< of the last launch, which nothing hides: reduce it as fast as possible
  at::Tensor buffer;     ///< flat 1-D, the undivided gradients with padding (zeros) between them
  at::Tensor shard;      ///< what of `buffer` is reduced on this rank: with optimizer.zero1 a part
  std::vector<at::Tensor> gradients;  ///< views of `buffer`, shaped like the parameters
  std::vector<at::Tensor> parameters;
  double divisor = 1;  ///< what the sum over ranks must be divided by: the world size, as a rule
  /// Defined for weighted_backward only: 1/sum(counts) on the device, to multiply with *instead of*
  /// dividing by `divisor`. Its value is there in finish(), not in start().
  at::Tensor inverse_divisor;
  Communicator* communicator = nullptr;
};

/// One hook serves one model. start() is called once a bucket, in the same order on every rank, as
/// soon as the bucket's gradients are there, and must not wait for a collective; finish() is called
/// for all buckets, in the same order, at the end of the backward and must leave the mean over the
/// ranks in `bucket.buffer`. Both run with autocast and gradient recording off. start() may be
/// called on the autograd engine's thread.
///
/// A hook may send tensors of any size, so no rank can check a size by itself before the hook
/// sends.
/// - CommunicatorOptions::check_collectives compares the operation, size and dtype of each call
/// over
///   the ranks before anything is sent. All ranks throw the same MismatchError.
/// - Without it, the backend may report different sizes, give wrong values, or crash.
/// - After finish() the reducer requires in `bucket.buffer` a tensor of the bucket's shape, dtype
///   and device, and throws SettingsError otherwise. The hook has sent its tensors by then.
class CommHook {
 public:
  virtual ~CommHook() = default;
  virtual std::string name() const = 0;
  virtual void start(GradBucket& bucket) = 0;
  virtual void finish(GradBucket& bucket) = 0;
  /// The buckets were laid out anew: state kept by bucket index is void.
  virtual void reset() {}
  /// start() only enqueues operations, so that several buckets' may go into one group call.
  virtual bool starts_in_group() const { return false; }
  /// Bytes sent for each byte of gradients, for ddp.bucket_cap_mb=auto.
  virtual double wire_fraction() const { return 1; }
  /// Whether a CUDA graph may capture it: it keeps no count or other state on the host that changes
  /// from step to step, for a replay repeats what the captured step did.
  virtual bool capturable() const { return true; }
};

/// The hook that `options.comm_hook` names; nullptr for "none", where the reducer all-reduces
/// itself.
std::shared_ptr<CommHook> make_comm_hook(const DdpOptions& options);

/// Divides by the divisor, then sums: PyTorch's default_hooks.allreduce_hook.
std::shared_ptr<CommHook> make_all_reduce_hook();
/// Casts to `wire_dtype` (kHalf or kBFloat16), divides, sums, casts back: PyTorch's
/// fp16/bf16_compress.
std::shared_ptr<CommHook> make_compress_hook(at::ScalarType wire_dtype);

struct PowerSgdOptions {
  int64_t rank = 1;                 ///< of the approximation of each matrix
  int64_t start_step = 1000;        ///< backwards reduced in full before
  double min_compression_rate = 2;  ///< matrices that would not shrink by more are sent in full
  uint64_t seed = 0;                ///< of the first Q, equal on all ranks
};
/// Low-rank compression with error feedback and warm start (Vogels et al., 2019, algorithm 2).
std::shared_ptr<CommHook> make_powersgd_hook(const PowerSgdOptions& options);

/// A hook from one function: called in start(), its work is waited for in finish().
std::shared_ptr<CommHook> make_function_hook(std::string name,
                                             std::function<WorkPtr(GradBucket&)> start);

}  // namespace ddp
