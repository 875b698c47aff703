// SPDX-License-Identifier: Apache-2.0
// Ops of image classifiers, in the order of a residual network. Where no kernel of this library
// serves an input, ATen's op that defines the result runs. No op makes the host wait; all can be
// captured in a CUDA graph. A weight with a place in a gradient bucket gets its gradient there.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ddp::ops {

/// conv2d without bias, with stride 2 and padding 3; with a 3x3 weight stride 1 and padding 1.
///
///   image   [batch, 3, height, width], any layout; float32, float64, bf16, fp16, or uint8 (cast,
///           not normalised)
///   weight  [filters, 3, 7, 7] or [filters, 3, 3, 3]
///   result  [batch, filters, (height - 1) / 2 + 1, (width - 1) / 2 + 1] or [batch, filters,
///           height, width], channels last from the kernels
///
/// Computes in autocast's dtype, else in weight's. On CUDA in bf16 or fp16 an exact rearrangement
/// of the image makes it a product for tensor cores, unless the image requires a gradient.
at::Tensor stem_convolution(const at::Tensor& image, const at::Tensor& weight);

/// conv2d(x, weight, stride, padding), without bias, groups or dilation.
///
///   x [batch, channels, height, width]; weight [filters, channels, 1, 1] with padding 0, or
///   [filters, channels, 3, 3] with padding 1
///
/// Computes in autocast's dtype, else in x's. On CUDA in bf16 or fp16 the result is channels last,
/// and convolutions that are one dense product (1x1, and few pixels) run as such. Otherwise, with
/// cuDNN's benchmark enabled, cuDNN's engines are timed at the first call of a shape.
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding);

class StatisticsExchange;  // of SyncBatchNorm

/// A BatchNorm2d's tensors ([channels]) and settings. The kernels serve bf16 and fp16 activations
/// in channels_last, with channels a multiple of 8 and float32 tensors here. They compute in
/// float32, their results do not depend on timing, and their backward is not differentiable.
/// Training updates running_mean and running_var in place.
struct BatchNormLayer {
  at::Tensor weight, bias;               ///< [channels]
  at::Tensor running_mean, running_var;  ///< [channels]
  bool training = true;                  ///< true: batch statistics; false: running estimates
  double momentum = 0.1;                 ///< of the running estimates: the new batch's share
  double eps = 1e-5;                     ///< added to the variance
  bool fused = true;                     ///< false: always ATen's ops
  /// From batch_norm_kernel_counters(), kept with the layer. If undefined, each call makes its own.
  /// Like the running estimates, only one stream at a time may use them.
  at::Tensor kernel_counters;
  /// If set, training uses all processes' batches, of which some may be empty. Then forward and
  /// backward are collective, and gradients of weight and bias are this process's share. Kernels
  /// exist only for the forms with a ReLU.
  std::shared_ptr<StatisticsExchange> exchange = nullptr;
};

/// Models with typed members derive from it so that convert_sync_batchnorm finds their layers.
class NormOwner {
 public:
  virtual ~NormOwner() = default;
  virtual std::vector<std::string> norm_names() const = 0;  ///< of children: "bn1", "bn2", …
  virtual std::shared_ptr<torch::nn::Module> norm(const std::string& name) const = 0;  ///< a child
  /// Registers `replacement` (forward(Tensor) -> Tensor) under the child's name.
  virtual void replace_norm(const std::string& name, torch::nn::AnyModule replacement) = 0;
};

/// One activation that two consumers read: the next block's convolutions and its shortcut. The
/// tensors share memory: do not modify them in place.
struct Fork {
  at::Tensor branch, shortcut;  ///< equal values; their gradients are added
};

/// bn(x)
at::Tensor batch_norm(const at::Tensor& x, const BatchNormLayer& bn);
/// silu(bn(x)), with silu(z) = z / (1 + exp(-z)). The kernels keep only x for the backward.
at::Tensor batch_norm_silu(const at::Tensor& x, const BatchNormLayer& bn);
/// relu(bn(x)). The Fork version serves a stem without pool whose result is read twice.
at::Tensor batch_norm_relu(const at::Tensor& x, const BatchNormLayer& bn);
Fork batch_norm_relu_fork(const at::Tensor& x, const BatchNormLayer& bn);  ///< see above
/// relu(bn(x) + residual), the end of a residual block. `residual` is shaped as x.
Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& residual);
/// relu(bn(x) + bn_z(z)), the end of a block whose shortcut is a convolution. z is shaped as x.
Fork batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn, const at::Tensor& z,
                         const BatchNormLayer& bn_z);
/// max_pool2d(relu(bn(x)), kernel 3, stride 2, padding 1): the stem.
Fork batch_norm_relu_max_pool(const at::Tensor& x, const BatchNormLayer& bn);

/// linear(mean of x over its pixels, weight, bias).
///
///   x [batch, channels, height, width], weight [classes, channels], bias [classes]; result
///   [batch, classes]
///
/// The kernels serve bf16 and fp16 on CUDA (autocast's dtype, else x's; weight and bias may be
/// float32). Up to 32 classes pooled values and sums are float32, else pooled values have x's
/// dtype.
at::Tensor pooled_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

struct CrossEntropyOptions {
  double label_smoothing = 0;   ///< in [0, 1]: share of the target spread over all classes
  int64_t ignore_index = -100;  ///< label of rows to ignore
};
struct CrossEntropyResult {
  at::Tensor loss;         ///< 0-dim, float32 (float64 for float64 logits): mean over counted rows
  at::Tensor num_correct;  ///< 0-dim, int64: rows whose largest logit, if finite, is the label
};

/// With p = softmax(logits), q = (1 - s) onehot(label) + s / classes and s = label_smoothing:
///
///   loss = mean over counted rows of -sum_c q_c log p_c,   dloss/dlogits = (p - q) / counted rows
///
///   logits [rows, classes], float32, float64, bf16 or fp16; labels int64 [rows]
///
/// Sums have a fixed order, so equal input gives equal bits. On CUDA an invalid label (outside
/// [0, classes), not ignore_index) makes the loss and its row's gradient NaN; the CPU raises.
/// Without counted rows the loss is NaN, as in PyTorch.
CrossEntropyResult cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                 const CrossEntropyOptions& options = {});

}  // namespace ddp::ops
