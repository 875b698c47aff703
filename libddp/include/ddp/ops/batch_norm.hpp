// SPDX-License-Identifier: Apache-2.0
// BatchNorm over [batch, channels, height, width], fused with the next ops of a residual network:
// ReLU, the sum with a shortcut, max pool (Ioffe and Szegedy, arXiv:1502.03167).
//
// Custom CUDA kernels serve bfloat16 and float16 activations in channels_last, with channels a
// multiple of 8 and float32 weight, bias and running estimates. They compute in float32. They read
// a large activation twice forward (statistics, result) and twice backward, and one that fits in
// registers once each way. They save x, the batch's mean and invstd, and one bit per element for
// the ReLU instead of y. With max pool they save one byte per pooled element, the position of the
// maximum. Results do not depend on timing. All other cases (CPU, other dtypes and layouts,
// gradients through running estimates) use ATen's ops, which define the result: at::batch_norm,
// add, at::relu, at::max_pool2d.
//
// With an exchange (SyncBatchNorm) the same passes run. One all-gather of a few numbers per channel
// joins the forward passes, one small all-reduce the backward passes.
//
// Training updates running_mean and running_var in place, as at::batch_norm. No host
// synchronisation; capturable in a CUDA graph. The kernels' backward is not differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace ddp::ops {

/// Shares batch statistics between processes (SyncBatchNorm). all_gather and all_reduce are
/// collective: every process calls them in the same order with tensors of equal size. The current
/// stream, not the host, waits for the result.
class StatisticsExchange {
 public:
  virtual ~StatisticsExchange() = default;
  virtual int64_t size() const = 0;       ///< processes
  virtual const void* group() const = 0;  ///< equal for the same set of processes
  /// Raises an error for users if a layer of `num_features` channels cannot process `input` or
  /// cannot train on it. Not collective.
  virtual void check_input(const at::Tensor& input, int64_t num_features, bool training) const = 0;
  /// Gathers `mine` [n] of every process: [size, n].
  virtual at::Tensor all_gather(const at::Tensor& mine) = 0;
  /// Sums over all processes, in place.
  virtual void all_reduce(const at::Tensor& sums) = 0;
};

/// A BatchNorm2d's tensors ([channels]) and settings.
struct BatchNormLayer {
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var;
  bool training = true;  ///< true: batch statistics; false: running estimates
  double momentum = 0.1;
  double eps = 1e-5;
  bool fused = true;  ///< false: always ATen's ops
  /// Counters of the kernels, made by batch_norm_tickets and kept with the layer. If undefined,
  /// each call makes its own. As the running estimates, not for concurrent use by two streams.
  at::Tensor tickets;
  /// If set, training uses the statistics of all processes' batches; a process's batch may be
  /// empty. Forward and backward are then collective. Gradients of weight and bias are this
  /// process's share.
  std::shared_ptr<StatisticsExchange> exchange = nullptr;
};

/// A normalisation module that these ops can replace. Models detect it with a dynamic_cast of each
/// norm.
class FusableNorm {
 public:
  virtual ~FusableNorm() = default;
  /// The layer's current tensors; nullopt if only the module's own forward can compute it.
  virtual std::optional<BatchNormLayer> fusable_layer() const = 0;
  /// num_batches_tracked, which the caller of these ops increments in training.
  virtual at::Tensor batch_counter() const = 0;
};

/// Zeros for BatchNormLayer::tickets. Undefined during a capture, since memory of a graph must not
/// be kept outside it.
at::Tensor batch_norm_tickets(const at::Tensor& weight);

/// One activation that two consumers read: the next block's convolutions and its shortcut.
///
/// Both tensors share memory. With the kernels they are two outputs of one autograd node: the
/// backward receives two gradients and adds them while reading. Otherwise they are one tensor. Do
/// not modify them in place.
struct Fork {
  at::Tensor branch, shortcut;
};

/// bn(x), always by ATen's ops.
at::Tensor batch_norm(const at::Tensor& x, const BatchNormLayer& bn);

/// relu(bn(x))
at::Tensor batch_norm_relu(const at::Tensor& x, const BatchNormLayer& bn);

/// Same, for two consumers: a stem without pool.
Fork batch_norm_relu_fork(const at::Tensor& x, const BatchNormLayer& bn);

/// relu(bn(x) + residual), the end of a residual block. `residual` is shaped as x.
Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& residual);

/// relu(bn(x) + bn_z(z)), the end of a block whose shortcut is a convolution. z is shaped as x.
Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& z,
                         const BatchNormLayer& bn_z);

/// max_pool2d(relu(bn(x)), kernel 3, stride 2, padding 1): the stem.
Fork batch_norm_relu_max_pool(const at::Tensor& x, const BatchNormLayer& bn);

}  // namespace ddp::ops
