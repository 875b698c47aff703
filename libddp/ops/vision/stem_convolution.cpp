// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/gemm/gemm.hpp"
#include "ops/grad_target.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/tensor_launch.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "ops/vision/stem_packing.hpp"

namespace ddp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Above this image side, patches cost more memory traffic than they save over space-to-depth.
constexpr int64_t kMaxIm2colSide = 64;

at::Tensor rows_of(const at::Tensor& channels_last) {
  return channels_last.permute({0, 2, 3, 1}).view({-1, channels_last.size(1)});
}

class DepthStem : public torch::autograd::Function<DepthStem> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& cells,
                            const at::Tensor& weight) {
    const AutocastOff no_autocast(cells.device().type());
    ctx->save_for_backward({cells, weight});
    ctx->set_materialize_grads(false);
    // The cells of 4x4x16 hold zeros beside the 7x7x3 taps, and have the output's size plus 3.
    const int64_t positions = cells.size(0) * (cells.size(2) - 3) * (cells.size(3) - 3);
    const detail::CountedOp counted(detail::product_flops(positions, weight.numel(), 1),
                                    cells.scalar_type(), detail::FlopKind::Convolution);
    return at::conv2d(cells, detail::stem_filter_to_depth(weight, cells.scalar_type()))
        .contiguous(at::MemoryFormat::ChannelsLast);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("stem_convolution");
    if (!grad_outputs[0].defined() || !ctx->needs_input_grad(1)) {
      return variable_list(2);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &cells = saved[0], &weight = saved[1];
    const AutocastOff no_autocast(cells.device().type());
    const detail::CountedOp counted(detail::convolution_flops(weight, grad_outputs[0]),
                                    cells.scalar_type(), detail::FlopKind::Convolution);
    // Only the filter's shape and dtype are used: no input gradient is computed.
    const auto shape =
        at::empty({weight.size(0), 16, 4, 4}, cells.options(), at::MemoryFormat::ChannelsLast);
    const auto packed = std::get<1>(at::convolution_backward(
        grad_outputs[0].contiguous(at::MemoryFormat::ChannelsLast), cells, shape, at::nullopt,
        {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1, {false, true, false}));
    const auto target = detail::grad_target(weight, ctx->needs_input_grad(1));
    detail::write_filter_from_depth(packed, target.memory, target.beta);
    return {at::Tensor(), target.result()};
  }
};

class PatchStem : public torch::autograd::Function<PatchStem> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& image, const at::Tensor& weight,
                            at::ScalarType dtype) {
    const AutocastOff no_autocast(image.device().type());
    ctx->set_materialize_grads(false);
    const auto side = [&](int64_t dim) {
      const int64_t size = image.size(dim);
      return weight.size(2) == 3 ? size : detail::stem_output(size);
    };
    const int64_t positions = image.size(0) * side(2) * side(3);
    const detail::CountedOp counted(detail::product_flops(positions, weight.numel(), 1), dtype);
    if (detail::supports_stem_product(image, weight, dtype)) {
      ctx->save_for_backward({image, weight});
      ctx->saved_data["patches"] = false;
      return detail::stem_product(image, weight, dtype);
    }
    const auto patches = detail::stem_patches(image, dtype);
    const auto output =
        at::empty({image.size(0), weight.size(0), detail::stem_output(image.size(2)),
                   detail::stem_output(image.size(3))},
                  patches.options(), at::MemoryFormat::ChannelsLast);
    detail::gemm(rows_of(output), patches, detail::stem_filter_rows(weight, dtype).t());
    ctx->save_for_backward({patches, weight});
    ctx->saved_data["patches"] = true;
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("stem_convolution");
    if (!grad_outputs[0].defined() || !ctx->needs_input_grad(1)) {
      return variable_list(3);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &patches = saved[0], &weight = saved[1];  // or the image itself
    const AutocastOff no_autocast(patches.device().type());
    const auto grad = grad_outputs[0].contiguous(at::MemoryFormat::ChannelsLast);
    const detail::CountedOp counted(detail::convolution_flops(weight, grad), grad.scalar_type());
    const auto target = detail::grad_target(weight, ctx->needs_input_grad(1));
    if (!ctx->saved_data["patches"].toBool()) {
      detail::write_stem_gradient(patches, grad, target);
      return {at::Tensor(), target.result(), at::Tensor()};
    }
    // The product is float32 if the gradient is float32.
    const auto dtype = target.memory.scalar_type() == at::kFloat ? at::kFloat : grad.scalar_type();
    const auto packed = at::empty({weight.size(0), patches.size(1)}, grad.options().dtype(dtype),
                                  at::MemoryFormat::Contiguous);
    detail::gemm(packed, rows_of(grad).t(), patches);
    detail::write_filter_from_rows(packed, target.memory, target.beta);
    return {at::Tensor(), target.result(), at::Tensor()};
  }
};

StemAlgorithm choose(const at::Tensor& image, at::ScalarType dtype) {
  if (!detail::runs_own_kernels(image, dtype) || image.scalar_type() == at::kDouble ||
      image.numel() == 0) {
    return StemAlgorithm::Library;
  }
  const bool small = std::max(image.size(2), image.size(3)) <= kMaxIm2colSide &&
                     detail::stem_patches_fit_image(image);
  return small ? StemAlgorithm::Im2col : StemAlgorithm::SpaceToDepth;
}

}  // namespace

at::Tensor stem_convolution(const at::Tensor& image, const at::Tensor& weight,
                            StemAlgorithm algorithm) {
  const bool small = weight.dim() == 4 && weight.size(2) == 3;
  TORCH_CHECK(weight.dim() == 4 && weight.size(1) == 3 && (small || weight.size(2) == 7) &&
                  weight.size(3) == weight.size(2) && image.dim() == 4 &&
                  (image.size(1) == 3 || (image.size(1) == 16 && !small)),
              "stem_convolution: an image [batch, 3, height, width] (for 7x7 also a result of "
              "stem_space_to_depth()) and a weight [filters, 3, 7, 7] or [filters, 3, 3, 3] "
              "are needed, not ",
              image.sizes(), " and ", weight.sizes());
  detail::check_same_device("stem_convolution", image, "weight", weight);
  const auto dtype = detail::compute_dtype(image, weight.scalar_type());
  TORCH_CHECK(!small || algorithm != StemAlgorithm::SpaceToDepth,
              "stem_convolution: SpaceToDepth needs a 7x7 filter, not ", weight.sizes());
  const bool wants_image_gradient = at::GradMode::is_enabled() && image.requires_grad();
  if (image.size(1) == 16) {
    TORCH_CHECK(!wants_image_gradient,
                "stem_convolution: an image of 16 channels (stem_space_to_depth) cannot have a "
                "gradient; pass the image of 3 channels, or detach this one");
    return DepthStem::apply(image.to(dtype), weight);
  }
  if (algorithm == StemAlgorithm::Auto) {
    algorithm = small ? StemAlgorithm::Im2col : choose(image, dtype);
  }
  if (algorithm == StemAlgorithm::Library || wants_image_gradient ||
      (small && !detail::supports_stem_product(image, weight, dtype))) {
    const AutocastOff no_autocast(image.device().type());
    return at::conv2d(image.to(dtype), weight.to(dtype), {}, /*stride=*/small ? 1 : 2,
                      /*padding=*/weight.size(2) / 2);
  }
  if (algorithm == StemAlgorithm::SpaceToDepth) {
    return DepthStem::apply(stem_space_to_depth(image, dtype), weight);
  }
  return PatchStem::apply(image, weight, dtype);
}

at::Tensor stem_convolution(const at::Tensor& image, const at::Tensor& weight) {
  return stem_convolution(image, weight, StemAlgorithm::Auto);
}

}  // namespace ddp::ops
