// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "ops/gemm/gemm.hpp"
#include "ops/grad_target.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/flop_counter.hpp"
#include "ops/streams/side_streams.hpp"
#include "ops/streams/weight_gradient.hpp"
#include "ops/tensor_launch.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "ops/vision/cudnn_convolution.hpp"
#include "ops/vision/tap_packing.hpp"

namespace ddp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kLast = at::MemoryFormat::ChannelsLast;

struct Geometry {
  int64_t kernel, stride, height, width;

  int64_t output(int64_t size) const { return (size - 1) / stride + 1; }
  bool is_pixel() const { return output(height) == 1 && output(width) == 1; }
};

Geometry geometry_of(at::IntArrayRef x, const at::Tensor& weight, int64_t stride) {
  return {weight.size(2), stride, x[2], x[3]};
}

/// Forms of a convolution as one product of rows of x with rows of a matrix.
enum class Form {
  None,
  Rows,    ///< 1x1, stride 1: a row is a pixel
  Corner,  ///< 1x1 with one output pixel: reads only the first pixel
  Centre,  ///< 3x3 on one pixel
  Dense,   ///< 3x3 on 2x2 pixels: a row is an image
};

Form form_of(const Geometry& g) {
  if (g.kernel == 1) {
    return g.stride == 1 ? Form::Rows : g.is_pixel() ? Form::Corner : Form::None;
  }
  if (g.height == 1 && g.width == 1) {
    return Form::Centre;
  }
  return g.height == 2 && g.width == 2 && g.stride <= 2 ? Form::Dense : Form::None;
}

/// [batch, height, width, channels] with one row per image; -1 is ambiguous for an empty batch.
at::Tensor image_rows(const at::Tensor& pixels) {
  return pixels.view({pixels.size(0), pixels.size(1) * pixels.size(2) * pixels.size(3)});
}

/// x or its gradient, channels last, as the product's rows.
at::Tensor input_rows(const at::Tensor& x, Form form) {
  const auto pixels = x.permute({0, 2, 3, 1});  // [batch, height, width, channels]
  if (form == Form::Rows || form == Form::Centre) {
    return pixels.view({-1, x.size(1)});
  }
  const auto images = image_rows(pixels);
  return form == Form::Corner ? images.narrow(1, 0, x.size(1)) : images;
}

/// The result or its gradient as the product's rows.
at::Tensor output_rows(const at::Tensor& y, Form form) {
  const auto pixels = y.permute({0, 2, 3, 1});
  return form == Form::Dense ? image_rows(pixels) : pixels.view({-1, y.size(1)});
}

/// The part of a filter, or of its gradient, used by forms without blocks: [filters, channels].
at::Tensor live_tap(const at::Tensor& filter) {
  const int64_t centre = filter.size(2) / 2;
  return filter.select(3, centre).select(2, centre);
}

/// The tap in a product's layout: row-major, with distinct rows (not those of an expanded filter).
at::Tensor rows_of_tap(const at::Tensor& tap, at::ScalarType dtype) {
  const auto matrix = tap.to(dtype);
  const bool fits = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  return fits ? matrix : matrix.contiguous();
}

detail::TapBlocks blocks_of(const Geometry& g) {
  return detail::TapBlocks::of(static_cast<int>(g.height), static_cast<int>(g.stride));
}

/// The dense matrix from prefetch_filter, else made now.
at::Tensor dense_filter(const at::Tensor& weight, const Geometry& g, at::ScalarType dtype) {
  const auto made = SideStreams::find(weight, g.stride, dtype);  // all are for 2x2 pixels
  return made.defined() ? made : detail::spread_taps(weight, blocks_of(g), dtype);
}

/// Writes the weight's gradient from a product to its target.
void write_product_gradient(const at::Tensor& weight, const Geometry& g, Form form,
                            const at::Tensor& grad_rows, const at::Tensor& x_rows,
                            const detail::GradTarget& target) {
  if (form != Form::Dense) {
    if (weight.size(2) > 1 && target.beta == 0) {
      target.memory.zero_();  // taps that only see padding
    }
    detail::gemm_into(live_tap(target.memory), target.beta, grad_rows.t(), x_rows);
    return;
  }
  // Blocks are added in float32 if the gradient is float32.
  const auto dtype =
      target.memory.scalar_type() == at::kFloat ? at::kFloat : grad_rows.scalar_type();
  const auto dense =
      at::empty({grad_rows.size(1), x_rows.size(1)}, grad_rows.options().dtype(dtype));
  detail::gemm(dense, grad_rows.t(), x_rows);
  detail::fold_taps(dense, blocks_of(g), target.memory, target.beta);
}

class ProductConv : public torch::autograd::Function<ProductConv> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            int64_t stride, at::ScalarType dtype) {
    const AutocastOff no_autocast(x_in.device().type());
    const auto x = x_in.to(dtype).contiguous(kLast);
    const auto g = geometry_of(x.sizes(), weight, stride);
    const Form form = form_of(g);
    const auto matrix =
        form == Form::Dense ? dense_filter(weight, g, dtype) : rows_of_tap(live_tap(weight), dtype);
    const auto y = at::empty({x.size(0), weight.size(0), g.output(g.height), g.output(g.width)},
                             x.options(), kLast);
    const detail::CountedOp counted(detail::convolution_flops(weight, y), dtype);
    detail::gemm(output_rows(y, form), input_rows(x, form), matrix.t());
    ctx->save_for_backward({x, weight, matrix});
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["x_dtype"] = x_in.scalar_type();
    ctx->saved_data["held_bytes_limit"] = SideStreams::held_bytes_limit();
    ctx->set_materialize_grads(false);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("conv2d");
    if (!grad_outputs[0].defined()) {
      return variable_list(4);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &matrix = saved[2];
    const AutocastOff no_autocast(x.device().type());
    const auto g = geometry_of(x.sizes(), weight, ctx->saved_data["stride"].toInt());
    const Form form = form_of(g);
    const auto grad = grad_outputs[0].contiguous(kLast);
    const auto grad_rows = output_rows(grad, form);
    const int num_gradients = int{ctx->needs_input_grad(0)} + int{ctx->needs_input_grad(1)};
    const detail::CountedOp counted(num_gradients * detail::convolution_flops(weight, grad),
                                    grad.scalar_type());
    const detail::WeightGradient weight_gradient(weight,
                                                 ctx->saved_data["held_bytes_limit"].toInt());
    at::Tensor grad_weight, grad_x;
    if (ctx->needs_input_grad(0)) {
      grad_x = form == Form::Corner ? at::zeros_like(x) : at::empty_like(x);
      detail::gemm(input_rows(grad_x, form), grad_rows, matrix);
      grad_x = grad_x.to(ctx->saved_data["x_dtype"].toScalarType());
    }
    if (ctx->needs_input_grad(1)) {
      grad_weight = weight_gradient.compute({x, grad}, [&] {
        const auto target = detail::grad_target(weight, true);
        write_product_gradient(weight, g, form, grad_rows, input_rows(x, form), target);
        return target.result();
      });
    }
    return {grad_x, grad_weight, at::Tensor(), at::Tensor()};
  }
};

/// The gradient of `weight`, which is wanted, written to its slot if it has one.
at::Tensor library_weight_gradient(const at::Tensor& weight, const detail::Convolution& call) {
  const auto by_library = [&](at::Tensor made) {
    auto into = call;
    into.w = std::move(made);
    if (!detail::convolve_by_cudnn(detail::ConvolutionPass::WeightGradient, into)) {
      into.w = std::get<1>(at::convolution_backward(
          call.y, call.x, call.w, at::nullopt, {call.stride, call.stride},
          {call.padding, call.padding}, {1, 1}, false, {0, 0}, 1, {false, true, false}));
    }
    return into.w;
  };
  const GradSlot* slot = find_grad_slot(weight);
  const bool same = slot != nullptr && slot->memory.scalar_type() == call.x.scalar_type();
  if (!call.concurrent && !same) {
    // The reducer copies many such gradients in one kernel.
    return by_library(at::empty(weight.sizes(), call.x.options(), kLast)).to(weight.scalar_type());
  }
  const auto target = detail::grad_target(weight, true);
  const bool direct = same && target.beta == 0;
  const auto made =
      by_library(direct ? target.memory : at::empty(weight.sizes(), call.x.options(), kLast));
  if (!made.is_same(target.memory)) {
    target.write(made);
  }
  return target.result();
}

class LibraryConv : public torch::autograd::Function<LibraryConv> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            int64_t stride, at::ScalarType dtype) {
    const AutocastOff no_autocast(x_in.device().type());
    const auto x = x_in.to(dtype).contiguous(kLast);
    const auto filter = weight.to(dtype).contiguous(kLast);
    const int64_t padding = weight.size(2) / 2;
    const auto g = geometry_of(x.sizes(), weight, stride);
    ctx->save_for_backward({x, weight, filter});
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["x_dtype"] = x_in.scalar_type();
    ctx->saved_data["held_bytes_limit"] = SideStreams::held_bytes_limit();
    ctx->set_materialize_grads(false);
    const auto y = at::empty({x.size(0), weight.size(0), g.output(g.height), g.output(g.width)},
                             x.options(), kLast);
    const detail::CountedOp counted(detail::convolution_flops(weight, y), dtype,
                                    detail::FlopKind::Convolution);
    return detail::convolve_by_cudnn(detail::ConvolutionPass::Forward,
                                     {x, filter, y, stride, padding})
               ? y
               : at::conv2d(x, filter, {}, stride, padding).contiguous(kLast);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    detail::check_differentiated_once("conv2d");
    if (!grad_outputs[0].defined()) {
      return variable_list(4);
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &filter = saved[2];
    const AutocastOff no_autocast(x.device().type());
    const auto grad = grad_outputs[0].contiguous(kLast);
    const int64_t stride = ctx->saved_data["stride"].toInt(), padding = weight.size(2) / 2;
    const int num_gradients = int{ctx->needs_input_grad(0)} + int{ctx->needs_input_grad(1)};
    const detail::CountedOp counted(num_gradients * detail::convolution_flops(weight, grad),
                                    grad.scalar_type(), detail::FlopKind::Convolution);
    const detail::WeightGradient weight_gradient(weight,
                                                 ctx->saved_data["held_bytes_limit"].toInt());
    at::Tensor grad_weight, grad_x;
    if (ctx->needs_input_grad(0)) {
      grad_x = at::empty(x.sizes(), x.options(), kLast);
      if (!detail::convolve_by_cudnn(detail::ConvolutionPass::InputGradient,
                                     {grad_x, filter, grad, stride, padding})) {
        grad_x = std::get<0>(at::convolution_backward(grad, x, filter, at::nullopt,
                                                      {stride, stride}, {padding, padding}, {1, 1},
                                                      false, {0, 0}, 1, {true, false, false}));
      }
      grad_x = grad_x.to(ctx->saved_data["x_dtype"].toScalarType());
    }
    if (ctx->needs_input_grad(1)) {
      grad_weight = weight_gradient.compute({x, grad, filter}, [&] {
        return library_weight_gradient(
            weight, {x, filter, grad, stride, padding, weight_gradient.is_concurrent()});
      });
    }
    return {grad_x, grad_weight, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

void prefetch_filter(const at::Tensor& weight, int64_t stride, int64_t height, int64_t width) {
  const Geometry g{weight.size(2), stride, height, width};
  const auto dtype = detail::compute_dtype(weight, weight.scalar_type());
  if (form_of(g) == Form::Dense && detail::runs_own_kernels(weight, dtype)) {
    const at::NoGradGuard no_grad;
    SideStreams::prefetch(weight, stride, dtype, [&](const at::Tensor& filter) {
      return detail::spread_taps(filter, blocks_of(g), dtype);
    });
  }
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding,
                  Conv2dAlgorithm algorithm) {
  TORCH_CHECK(
      x.dim() == 4 && weight.dim() == 4 && x.size(1) == weight.size(1) &&
          weight.size(2) == weight.size(3) && (weight.size(2) == 1 || weight.size(2) == 3) &&
          padding == weight.size(2) / 2 && stride >= 1,
      "conv2d: x [batch, channels, height, width] and weight [filters, channels, 1, 1] with "
      "padding 0 or [filters, channels, 3, 3] with padding 1 are needed, not ",
      x.sizes(), " and ", weight.sizes(), " with padding ", padding, " and stride ", stride);
  detail::check_same_device("conv2d", x, "weight", weight);
  const auto g = geometry_of(x.sizes(), weight, stride);
  const auto dtype = detail::compute_dtype(x, x.scalar_type());
  const bool own = detail::runs_own_kernels(x, dtype) && x.numel() > 0;
  TORCH_CHECK(algorithm != Conv2dAlgorithm::Product || form_of(g) != Form::None, "conv2d: a ",
              g.kernel, "x", g.kernel, " convolution of stride ", stride, " over ", g.height, "x",
              g.width, " pixels is not one dense product; use Conv2dAlgorithm::Auto");
  const bool is_product = algorithm == Conv2dAlgorithm::Product ||
                          (algorithm == Conv2dAlgorithm::Auto && own && form_of(g) != Form::None);
  if (is_product) {
    return ProductConv::apply(x, weight, stride, dtype);
  }
  if (own && weight.scalar_type() != at::kDouble) {
    return LibraryConv::apply(x, weight, stride, dtype);
  }
  const AutocastOff no_autocast(x.device().type());
  return at::conv2d(x.to(dtype), weight.to(dtype), {}, stride, padding);
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding) {
  return conv2d(x, weight, stride, padding, Conv2dAlgorithm::Auto);
}

}  // namespace ddp::ops
