// SPDX-License-Identifier: Apache-2.0
// Ops of image classifiers, in the order of a residual network.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ddp::ops {

// The first convolution of a ResNet, over three channels, in shapes for tensor cores: 7x7 of stride
// 2 and padding 3, or, for images of 32 pixels, 3x3 of stride 1 and padding 1. Three input channels
// fill only three of the sixteen lanes of tensor cores. The exact rearrangements here fill them.
//
//   SpaceToDepth: the image, padded by 3, is cut into 2x2 cells whose pixels become channels; the
//                 filter, padded to 8x8, likewise becomes 4x4 over 16 channels, stride 1, no
//                 padding (12 of the 16 channels carry something).
//   Im2col:       each output pixel's 7x7x3 patch becomes one row of a matrix, 147 columns and 5 of
//                 zeros: for small images with few patches. With 64 filters patches exist only in
//                 shared memory.
//
// 3x3 filters have Im2col only in shared memory (64 filters, at most 32 pixels per row, bf16 or
// fp16). Everything else uses Library.

enum class StemAlgorithm {
  Auto,          ///< CUDA with bf16 or fp16: one of the rearrangements; otherwise Library
  Library,       ///< at::conv2d, which defines the result
  SpaceToDepth,  ///< runs on any device and dtype (tests)
  Im2col,        ///< 7x7: runs on any device and dtype (tests)
};

/// conv2d(image, weight, stride 2, padding 3), with a 3x3 weight stride 1 and padding 1; without
/// bias.
///
///   image   [batch, 3, height, width], any layout; float32, float64, bf16, fp16 or uint8 (cast as
///           it is: normalised or not, that is the caller's), or what stem_space_to_depth() made
///   weight  [filters, 3, 7, 7] or [filters, 3, 3, 3]
///   result  [batch, filters, (height - 1) / 2 + 1, (width - 1) / 2 + 1] or [batch, filters,
///           height, width], channels last where an algorithm other than Library ran
///
/// Computes in autocast's dtype, else in weight's. Saves only the rearranged image for the
/// backward. The gradient of `weight` goes to its grad slot if it has one, else it is returned in
/// weight's dtype. An image that requires a gradient uses Library. An image of 16 channels cannot
/// have a gradient.
at::Tensor stem_convolution(const at::Tensor& image, const at::Tensor& weight,
                            StemAlgorithm algorithm = StemAlgorithm::Auto);

/// The input of SpaceToDepth, for loaders that can make it in their own kernel:
///
///   result [batch, 16, rows + 3, columns + 3], channels last, of `dtype`, with rows and columns
///   those of the convolution's result;
///   result[n, (dy * 2 + dx) * 4 + c, i, j] = padded[n, c, 2 i + dy, 2 j + dx], padded being the
///   image with 3 zeros before its first row and column and zeros behind its last; c = 3 is zero.
///
/// Not differentiable: an image that requires a gradient is refused.
at::Tensor stem_space_to_depth(const at::Tensor& image, at::ScalarType dtype);

// Convolutions without bias, 1x1 and 3x3, as in residual networks. On images of 1x1 or 2x2 pixels a
// convolution is one dense matrix product. A 3x3 filter on one pixel uses only its centre. On 2x2
// pixels one known tap connects each input pixel with each output pixel. A library's kernel would
// compute all nine taps, most of them padding.

enum class Conv2dAlgorithm {
  Auto,     ///< CUDA with bf16 or fp16: Product if there is such a form; else Library
  Library,  ///< at::conv2d's kernels, which define the result
  Product,  ///< dense products, on any device and dtype; raises if there is no such form
};

/// conv2d(x, weight, stride, padding), without bias, groups or dilation.
///
///   x [batch, channels, height, width]; weight [filters, channels, 1, 1] with padding 0, or
///   [filters, channels, 3, 3] with padding 1
///
/// Forms of Product: 1x1 with stride 1, or with one output pixel; 3x3 on 1x1 pixels, or on 2x2 with
/// stride 1 or 2. These rearrangements are exact: the convolution's sums in another order.
///
/// Computes in autocast's dtype, else in x's. On CUDA in bf16 or fp16 the result is channels last.
/// The gradient of `weight` then goes to its grad slot with Product, an open WgradBranch
/// (wgrad_branch.hpp) or a slot of the compute dtype. Otherwise it is returned in weight's dtype.
/// Unused taps have a zero gradient.
///
/// With cuDNN's benchmark enabled (at::globalContext().setBenchmarkCuDNN) Library times cuDNN's
/// engines on the device at the first call of a shape. Without it, in deterministic mode and for
/// shapes first met in a capture, at::conv2d chooses.
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding,
                  Conv2dAlgorithm algorithm = Conv2dAlgorithm::Auto);

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

/// A module whose normalisation layers can be replaced after construction (typed members cannot).
/// Models also derive from NormOwner so that convert_sync_batchnorm finds their layers, with a
/// dynamic_cast of each of `module.modules()`.
class NormOwner {
 public:
  virtual ~NormOwner() = default;
  /// Registered names of the direct children that normalise ("bn1", "bn2", …).
  virtual std::vector<std::string> norm_names() const = 0;
  /// The child called `name` (one of norm_names()).
  virtual std::shared_ptr<torch::nn::Module> norm(const std::string& name) const = 0;
  /// Replaces that child by `replacement` (forward(Tensor) -> Tensor), under the same name.
  virtual void replace_norm(const std::string& name, torch::nn::AnyModule replacement) = 0;
};

// The head of a convolutional classifier: global average pool and linear layer.

/// linear(mean of x over its pixels, weight, bias).
///
///   x [batch, channels, height, width], weight [classes, channels], bias [classes]; result
///   [batch, classes]
///
/// Defined by at::linear(adaptive_avg_pool2d(x, 1).flatten(1), weight, bias), which also serves
/// CPUs and other dtypes. On CUDA in bf16 or fp16 (autocast's dtype, else x's; weight and bias may
/// be float32) x is read once, channels last (other layouts are copied first). Up to 32 classes:
/// one kernel forward and one backward, pooled values and sums in float32; more classes: two
/// kernels forward and four backward, the pooled values rounded to x's dtype. Gradients of weight
/// and bias go to their grad slots, if any. Saves the pooled values instead of x.
at::Tensor pooled_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// The mean cross-entropy with label smoothing, its gradient, and the number of correct predictions,
// each in one read of the logits.

struct CrossEntropyOptions {
  double label_smoothing = 0;   ///< in [0, 1]: share of the target spread over all classes
  int64_t ignore_index = -100;  ///< label of rows to ignore
};

struct CrossEntropyResult {
  at::Tensor loss;  ///< 0-dim, float32 (float64 for float64 logits): mean over counted rows
  at::Tensor
      num_correct;  ///< 0-dim, int64, without gradient: rows whose largest logit is the label
};

/// With p = softmax(logits), q = (1 - s) onehot(label) + s / classes and s = label_smoothing:
///
///   loss = mean over counted rows of -sum_c q_c log p_c,   dloss/dlogits = (p - q) / counted rows
///
///   logits [rows, classes], float32, float64, bf16 or fp16; labels int64 [rows]
///
/// Defined by at::cross_entropy_loss on float32 logits, which also is the CPU path. On CUDA: one or
/// two kernels forward, one backward, no host sync. Sums have a fixed order, so equal input gives
/// equal bits. On CUDA an invalid label (outside [0, classes), not ignore_index) makes the loss and
/// its row's gradient NaN; the CPU raises. Without counted rows the loss is NaN, as in PyTorch. A
/// row with NaN or an infinite largest logit never counts as correct.
CrossEntropyResult cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                 const CrossEntropyOptions& options = {});

}  // namespace ddp::ops
