// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/vision.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/shared/autocast_off.hpp"
#include "ops/tensor_launch.hpp"
#ifdef DDP_HAS_CUDA
#include "ops/language/cross_entropy_kernels.hpp"
#endif

namespace ddp::ops {
namespace {

CrossEntropyResult by_aten(const at::Tensor& logits, const at::Tensor& labels,
                           const CrossEntropyOptions& options) {
  const auto wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  const auto largest = logits.detach().max(1);
  const auto right = std::get<1>(largest).eq(labels).logical_and_(std::get<0>(largest).isfinite());
  return {at::cross_entropy_loss(wide, labels, {}, at::Reduction::Mean, options.ignore_index,
                                 options.label_smoothing),
          right.logical_and_(labels.ne(options.ignore_index)).sum()};
}

#ifdef DDP_HAS_CUDA
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

detail::CrossEntropyRows rows_of(const at::Tensor& logits, const at::Tensor& labels,
                                 const CrossEntropyOptions& options) {
  return {.logits = logits.const_data_ptr(),
          .element = detail::element_of(logits.scalar_type()),
          .labels = labels.const_data_ptr<int64_t>(),
          .rows = static_cast<int>(logits.size(0)),
          .classes = static_cast<int>(logits.size(1)),
          .ignore_index = options.ignore_index,
          .label_smoothing = static_cast<float>(options.label_smoothing)};
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& logits_in,
                               const at::Tensor& labels_in, const CrossEntropyOptions& options) {
    const c10::cuda::CUDAGuard device(logits_in.device());
    const auto logits = logits_in.contiguous(), labels = labels_in.contiguous();
    const auto numbers = logits.options().dtype(at::kFloat);
    const auto maxima = at::empty({logits.size(0)}, numbers);
    const auto log_sums = at::empty_like(maxima);
    const auto row_losses = at::empty({logits.size(0)}, numbers);
    const auto row_marks = at::empty({logits.size(0)}, numbers.dtype(at::kInt));
    const auto loss = at::empty({}, numbers), inverse_count = at::empty({}, numbers);
    const auto num_correct = at::empty({}, numbers.dtype(at::kLong));
    C10_CUDA_CHECK(
        detail::launch_cross_entropy(rows_of(logits, labels, options),
                                     {.maxima = maxima.mutable_data_ptr<float>(),
                                      .log_sums = log_sums.mutable_data_ptr<float>(),
                                      .row_losses = row_losses.mutable_data_ptr<float>(),
                                      .row_marks = row_marks.mutable_data_ptr<int>(),
                                      .loss = loss.mutable_data_ptr<float>(),
                                      .inverse_count = inverse_count.mutable_data_ptr<float>(),
                                      .num_correct = num_correct.mutable_data_ptr<int64_t>()},
                                     detail::stream_of(logits)));
    ctx->save_for_backward({logits, labels, maxima, log_sums, inverse_count});
    ctx->saved_data["label_smoothing"] = options.label_smoothing;
    ctx->saved_data["ignore_index"] = options.ignore_index;
    ctx->mark_non_differentiable({num_correct});
    ctx->set_materialize_grads(false);  // else a kernel would make zeros for num_correct
    return {loss, num_correct};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("cross_entropy");
    if (!grad_outputs[0].defined()) {
      return variable_list(3);
    }
    const auto saved = ctx->get_saved_variables();
    const auto& logits = saved[0];
    const c10::cuda::CUDAGuard device(logits.device());
    const CrossEntropyOptions options{
        .label_smoothing = ctx->saved_data["label_smoothing"].toDouble(),
        .ignore_index = ctx->saved_data["ignore_index"].toInt()};
    const auto grad_loss = grad_outputs[0].to(at::kFloat);
    const auto grad = at::empty_like(logits);
    C10_CUDA_CHECK(detail::launch_cross_entropy_backward(
        rows_of(logits, saved[1], options), saved[2].const_data_ptr<float>(),
        saved[3].const_data_ptr<float>(), saved[4].const_data_ptr<float>(),
        grad_loss.const_data_ptr<float>(), grad.mutable_data_ptr(), detail::stream_of(logits)));
    return {grad, at::Tensor(), at::Tensor()};
  }
};
#endif

}  // namespace

CrossEntropyResult cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                 const CrossEntropyOptions& options) {
  TORCH_CHECK(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
                  labels.scalar_type() == at::kLong,
              "cross_entropy: logits [rows, classes] and int64 labels [rows] are needed, not ",
              logits.sizes(), " and ", labels.sizes(), " of ", labels.scalar_type());
  detail::check_same_device("cross_entropy", logits, "labels", labels);
  TORCH_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
              "cross_entropy: label_smoothing must lie in [0, 1], not ", options.label_smoothing);
  const AutocastOff no_autocast(logits.device().type());
#ifdef DDP_HAS_CUDA
  if (detail::runs_own_code(logits) && logits.scalar_type() != at::kDouble && logits.numel() > 0) {
    auto outputs = CrossEntropy::apply(logits, labels, options);
    return {outputs[0], outputs[1]};
  }
#endif
  return by_aten(logits, labels, options);
}

}  // namespace ddp::ops
