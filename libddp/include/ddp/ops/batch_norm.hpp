// SPDX-License-Identifier: Apache-2.0
// BatchNorm over [batch, channels, height, width] together with what follows it in a residual
// network: ReLU, the sum with a shortcut, max pool (Ioffe and Szegedy, arXiv:1502.03167).
//
// Own CUDA kernels serve bfloat16 and float16 activations in channels_last, with channels a
// multiple of 8 and float32 weight, bias and running estimates. They read a large activation twice
// forward (statistics, result) and twice backward, one that fits into registers once each way; they
// save x, the batch's mean and invstd and one bit an element for the ReLU instead of y (before a
// max pool one byte an element of its result, which says where the maximum was), and compute in
// float32. Results do not depend on timing. Everything else (CPU, other dtypes and layouts;
// gradients through running estimates) is composed of ATen's ops, which define the result:
// at::batch_norm, add, at::relu, at::max_pool2d.
//
// With an exchange (SyncBatchNorm) the kernels' passes are the same; between them one all-gather of
// a few numbers a channel forward and one small all-reduce backward.
//
// Training moves running_mean and running_var in place, as at::batch_norm. No host synchronisation;
// capturable in a CUDA graph. The kernels' backward cannot be differentiated again.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace ddp::ops {

/// How processes share the statistics of their batches (SyncBatchNorm). Both calls are collective:
/// in every process, in the same order, with tensors of equal size; the current stream, not the
/// host, waits for the result.
class StatisticsExchange {
 public:
  virtual ~StatisticsExchange() = default;
  virtual int64_t size() const = 0;       ///< processes
  virtual const void* group() const = 0;  ///< equal where the same processes exchange
  /// Raises what the caller's users are to see where a layer of `num_features` channels cannot take
  /// `input`, or cannot train on it. Not collective.
  virtual void check_input(const at::Tensor& input, int64_t num_features, bool training) const = 0;
  /// `mine` [n] of every process: [size, n].
  virtual at::Tensor all_gather(const at::Tensor& mine) = 0;
  /// Sums over the processes, in place.
  virtual void all_reduce(const at::Tensor& sums) = 0;
};

/// A BatchNorm2d's tensors ([channels]) and settings.
struct BatchNormLayer {
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var;
  bool training = true;  ///< batch statistics; false: the running estimates
  double momentum = 0.1;
  double eps = 1e-5;
  bool fused = true;  ///< false: ATen's ops always
  /// Counters of the kernels, made by batch_norm_tickets and kept with the layer; may be undefined:
  /// then each call makes some. As the running estimates, not for two streams at once.
  at::Tensor tickets;
  /// Not null: in training, statistics are those of all processes' batches, of which one may be
  /// empty. Forward and backward are collective then. weight's and bias's gradients are this
  /// process's share.
  std::shared_ptr<StatisticsExchange> exchange = nullptr;
};

/// A normalisation module that these ops can compute in its place. Models look for it in each of
/// their norms with dynamic_cast.
class FusableNorm {
 public:
  virtual ~FusableNorm() = default;
  /// The layer as it is now; nullopt where only the module's own forward computes it.
  virtual std::optional<BatchNormLayer> fusable_layer() const = 0;
  /// num_batches_tracked, which whoever computes the layer moves in training.
  virtual at::Tensor batch_counter() const = 0;
};

/// Zeros for BatchNormLayer::tickets; undefined while the current stream is being captured, for
/// memory of a graph must not be kept outside it.
at::Tensor batch_norm_tickets(const at::Tensor& weight);

/// One activation that two consumers read: the next block's convolutions and its shortcut.
///
/// Both tensors are the same memory. Where the kernels run they are two outputs of one autograd
/// node, so that the backward gets two gradients and adds them while it reads them; elsewhere they
/// are one tensor. Do not change either in place.
struct Fork {
  at::Tensor branch, shortcut;
};

/// bn(x), always by ATen's ops.
at::Tensor batch_norm(const at::Tensor& x, const BatchNormLayer& bn);

/// relu(bn(x))
at::Tensor batch_norm_relu(const at::Tensor& x, const BatchNormLayer& bn);

/// The same for two consumers: a stem without pool.
Fork batch_norm_relu_fork(const at::Tensor& x, const BatchNormLayer& bn);

/// relu(bn(x) + residual), the end of a residual block. `residual` is shaped as x.
Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& residual);

/// relu(bn(x) + bn_z(z)), the end of a block whose shortcut is a convolution. z is shaped as x.
Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& z,
                         const BatchNormLayer& bn_z);

/// max_pool2d(relu(bn(x)), kernel 3, stride 2, padding 1): the stem.
Fork batch_norm_relu_max_pool(const at::Tensor& x, const BatchNormLayer& bn);

}  // namespace ddp::ops
