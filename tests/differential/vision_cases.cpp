// SPDX-License-Identifier: Apache-2.0

#include "ddp/ops/vision.hpp"
#include "differential/cases.hpp"
#include "ops/vision/channel_scale.hpp"

namespace differential {
namespace {

constexpr auto kLast = torch::MemoryFormat::ChannelsLast;

torch::Tensor images(Draw& draw, torch::IntArrayRef sizes, torch::Dtype dtype) {
  const auto values = draw.normal(sizes, dtype);
  return draw.chance(0.6) ? values.contiguous(kLast) : values;
}

Case conv2d(Draw& draw) {
  Case one;
  const auto dtype = draw.dtype();
  one.autocast = dtype == torch::kFloat && draw.chance(0.25);
  one.tolerance = 2 * rounding_of(one.autocast ? torch::kBFloat16 : dtype);
  const int64_t kernel = draw.one_of<int64_t>({1, 3}), stride = draw.number(1, 2);
  const int64_t channels = draw.size(40), filters = draw.size(40);
  // On the CPU in bfloat16, LibTorch leaves taps of the weight's gradient unwritten at width 1. So
  // stems are wider too.
  const int64_t least = draw.device().is_cpu() && one.tolerance > 1e-3 ? 2 : 1;
  const int64_t height = draw.number(least, 9);
  const int64_t width = draw.chance(0.6) ? height : draw.number(least, 9);
  one.add(images(draw, {draw.number(1, 4), channels, height, width}, dtype));
  const auto weight_dtype = dtype == torch::kBFloat16 && draw.chance(0.3) ? torch::kFloat : dtype;
  one.add(draw.normal({filters, channels, kernel, kernel}, weight_dtype, 0.2), true);
  one.op = [=](const Tensors& in) {
    return Tensors{ddp::ops::conv2d(in[0], in[1], stride, kernel / 2)};
  };
  one.twin = [=](const Tensors& in) {
    return Tensors{torch::conv2d(in[0], in[1], {}, stride, kernel / 2)};
  };
  one.text = text_of(dtype, one.autocast ? "autocast" : "", "x", one.inputs[0].sizes(), "weight",
                     one.inputs[1].sizes(), "stride", stride);
  return one;
}

Case stem_convolution(Draw& draw) {
  Case one;
  const auto dtype = draw.dtype();
  one.tolerance = 2 * rounding_of(dtype);
  const int64_t kernel = draw.one_of<int64_t>({3, 7}), filters = draw.size(64);
  const auto sizes =
      std::vector<int64_t>{draw.number(1, 3), 3, draw.number(8, 40), 4 + draw.size(36)};
  const bool learns_image = draw.chance(0.3);
  const auto image = images(draw, sizes, dtype);
  one.add(draw.normal({filters, 3, kernel, kernel}, dtype, 0.2), true);
  if (learns_image) {
    one.add(image);
  }
  one.op = [=](const Tensors& in) {
    return Tensors{ddp::ops::stem_convolution(learns_image ? in[1] : image, in[0])};
  };
  one.twin = [=](const Tensors& in) {
    return Tensors{torch::conv2d(learns_image ? in[1] : image.to(torch::kDouble), in[0], {},
                                 kernel == 7 ? 2 : 1, kernel / 2)};
  };
  one.text = text_of(dtype, "image", torch::IntArrayRef(sizes), image.strides(), "kernel", kernel,
                     "filters", filters);
  return one;
}

Case pooled_linear(Draw& draw) {
  Case one;
  const auto dtype = draw.dtype();
  one.autocast = dtype == torch::kFloat && draw.chance(0.25);
  one.tolerance = 3 * rounding_of(one.autocast ? torch::kBFloat16 : dtype);
  const int64_t channels = draw.size(96), classes = draw.number(1, 60);
  one.add(
      images(draw, {draw.number(1, 20), channels, draw.number(1, 6), draw.number(1, 6)}, dtype));
  one.add(draw.normal({classes, channels}, dtype), true);
  one.add(draw.normal({classes}, dtype), true);
  one.op = [](const Tensors& in) { return Tensors{ddp::ops::pooled_linear(in[0], in[1], in[2])}; };
  one.twin = [](const Tensors& in) {
    return Tensors{torch::linear(in[0].mean({2, 3}), in[1], in[2])};
  };
  one.text = text_of(dtype, one.autocast ? "autocast" : "", "x", one.inputs[0].sizes(), "classes",
                     classes);
  return one;
}

Case channel_scale(Draw& draw) {
  Case one;
  const auto dtype = draw.dtype();
  // The means and the scale are rounded too, and their errors go through the gradients.
  one.tolerance = 4 * rounding_of(dtype);
  const int64_t batch = draw.number(1, 20);
  const int64_t channels = draw.chance(0.7) ? 8 * draw.number(1, 40) : draw.size(40);
  one.add(images(draw, {batch, channels, draw.number(1, 9), draw.number(1, 9)}, dtype));
  one.add(draw.normal({channels, 1, 1}, dtype), true);
  one.op = [](const Tensors& in) {
    const auto of = ddp::ops::detail::channel_means(in[0]);
    return Tensors{ddp::ops::detail::scale_channels(of, torch::sigmoid(of.means * in[1]))};
  };
  one.twin = [](const Tensors& in) {
    return Tensors{in[0] * torch::sigmoid(in[0].mean({2, 3}, true) * in[1])};
  };
  one.text = text_of(dtype, "x", one.inputs[0].sizes(), one.inputs[0].strides());
  return one;
}

Case cross_entropy(Draw& draw) {
  Case one;
  const auto dtype = draw.dtype();
  const int64_t rows = draw.number(1, 60), classes = draw.number(2, 70);
  const double smoothing = draw.chance(0.4) ? 0.1 : 0;
  const auto labels = draw.labels(rows, classes);
  auto logits = draw.normal({rows, classes}, dtype);
  const bool confident = draw.chance(0.5);
  if (confident) {  // small losses
    logits = logits + 12 * torch::one_hot(labels.clamp_min(0), classes).to(dtype);
  }
  one.add(logits);
  // Losses are sums of float32 in every dtype but float64. A gradient is rounded once. ATen's
  // float32 keeps only the digits of a loss of 1e-5 that 1 + 1e-5 has.
  one.tolerance = dtype == torch::kDouble  ? 1e-9
                  : dtype == torch::kFloat ? 1e-5
                                           : rounding_of(dtype);
  // float16 has no digits for gradients below 1e-5.
  one.floor = draw.device().is_cpu() || dtype == torch::kDouble ? 0.05
              : dtype == torch::kHalf                           ? 1e-4
                                                                : 0;
  one.op = [=](const Tensors& in) {
    const auto result = ddp::ops::cross_entropy(in[0], labels, {.label_smoothing = smoothing});
    return Tensors{result.loss, result.num_correct};
  };
  one.twin = [=](const Tensors& in) {
    const auto right = in[0].argmax(1).eq(labels).sum();
    // The twin of equal largest logits is the op's own count: which of them argmax takes is open.
    const auto count = dtype == torch::kFloat || dtype == torch::kDouble
                           ? right
                           : ddp::ops::cross_entropy(in[0].detach().to(dtype), labels).num_correct;
    return Tensors{
        torch::cross_entropy_loss(in[0], labels, {}, at::Reduction::Mean, -100, smoothing),
        count.to(torch::kDouble)};
  };
  one.text = text_of(dtype, "logits", one.inputs[0].sizes(), "smoothing", smoothing, "confident",
                     confident);
  return one;
}

// ---- batch norms

enum class Form { Plain, Relu, Fork, AddRelu, AddReluNorm, ReluMaxPool, Silu };

struct Norm {
  torch::Tensor mean, var;
  bool training;
  double momentum;

  ddp::ops::BatchNormLayer layer(const torch::Tensor& weight, const torch::Tensor& bias) const {
    ddp::ops::BatchNormLayer layer;
    layer.weight = weight;
    layer.bias = bias;
    layer.running_mean = mean.clone();
    layer.running_var = var.clone();
    layer.training = training;
    layer.momentum = momentum;
    return layer;
  }
};

torch::Tensor normed(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     const torch::Tensor& mean, const torch::Tensor& var, const Norm& norm) {
  return torch::batch_norm(x, weight, bias, mean, var, norm.training, norm.momentum, 1e-5, false);
}

/// Results with the running estimates behind them.
Tensors outputs_of(Form form, const Tensors& in, const Norm& norm) {
  const auto bn = norm.layer(in[1], in[2]);
  Tensors results;
  const auto both = [&](const ddp::ops::Fork& fork) { results = {fork.branch, fork.shortcut}; };
  switch (form) {
    case Form::Plain:
      results = {ddp::ops::batch_norm(in[0], bn)};
      break;
    case Form::Relu:
      results = {ddp::ops::batch_norm_relu(in[0], bn)};
      break;
    case Form::Silu:
      results = {ddp::ops::batch_norm_silu(in[0], bn)};
      break;
    case Form::Fork:
      both(ddp::ops::batch_norm_relu_fork(in[0], bn));
      break;
    case Form::AddRelu:
      both(ddp::ops::batch_norm_add_relu(in[0], bn, in[3]));
      break;
    case Form::AddReluNorm:
      both(ddp::ops::batch_norm_add_relu(in[0], bn, in[3], norm.layer(in[4], in[5])));
      break;
    case Form::ReluMaxPool:
      both(ddp::ops::batch_norm_relu_max_pool(in[0], bn));
  }
  results.push_back(bn.running_mean);
  results.push_back(bn.running_var);
  return results;
}

Tensors twins_of(Form form, const Tensors& in, const Norm& norm) {
  const auto estimate = [](const torch::Tensor& of) { return of.to(torch::kDouble).clone(); };
  const auto mean = estimate(norm.mean), var = estimate(norm.var);
  auto y = normed(in[0], in[1], in[2], mean, var, norm);
  Tensors results;
  switch (form) {
    case Form::Plain:
      results = {y};
      break;
    case Form::Relu:
      results = {torch::relu(y)};
      break;
    case Form::Silu:
      results = {torch::silu(y)};
      break;
    case Form::AddRelu:
      y = y + in[3];
      break;
    case Form::AddReluNorm:
      y = y + normed(in[3], in[4], in[5], estimate(norm.mean), estimate(norm.var), norm);
      break;
    default:
      break;
  }
  if (results.empty()) {
    y = torch::relu(y);
    y = form == Form::ReluMaxPool ? torch::max_pool2d(y, 3, 2, 1) : y;
    results = {y, y * 1};
  }
  results.push_back(mean);
  results.push_back(var);
  return results;
}

Case batch_norm(Draw& draw) {
  Case one;
  const auto form = static_cast<Form>(draw.number(0, 6));
  // ATen rounds in front of the ReLU and the maximum. In 16 bits that moves whole gradients, so
  // only inputs of the kernels, which round once, are compared there.
  const auto dtype =
      draw.device().is_cuda()
          ? draw.one_of<torch::Dtype>({torch::kFloat, torch::kHalf, torch::kBFloat16})
          : draw.one_of<torch::Dtype>({torch::kFloat, torch::kDouble});
  const bool half = dtype == torch::kHalf || dtype == torch::kBFloat16;
  const int64_t channels = half ? 8 * draw.number(1, 12) : draw.size(48);
  const std::vector<int64_t> sizes{draw.number(2, 6), channels, draw.number(2, 9),
                                   draw.number(2, 9)};
  const auto numbers = half ? torch::kFloat : dtype;
  const auto activation = [&] {
    return half ? draw.normal(sizes, dtype).contiguous(kLast) : images(draw, sizes, dtype);
  };
  const bool training = half || draw.chance(0.8);
  const Norm norm{draw.dense({channels}, numbers), draw.dense({channels}, numbers).square() + 0.5,
                  training, 0.3};
  one.add(activation());
  one.add(half ? draw.dense({channels}, numbers) : draw.normal({channels}, numbers), true);
  one.add(half ? draw.dense({channels}, numbers) : draw.normal({channels}, numbers), true);
  if (form == Form::AddRelu || form == Form::AddReluNorm) {
    one.add(activation());
  }
  if (form == Form::AddReluNorm) {
    one.add(draw.dense({channels}, numbers), true);
    one.add(draw.dense({channels}, numbers), true);
  }
  one.tolerance = half ? 3 * rounding_of(dtype) : dtype == torch::kFloat ? 2e-4 : 1e-9;
  one.op = [=](const Tensors& in) { return outputs_of(form, in, norm); };
  one.twin = [=](const Tensors& in) { return twins_of(form, in, norm); };
  one.text = text_of(dtype, "form", static_cast<int>(form), "x", torch::IntArrayRef(sizes),
                     one.inputs[0].strides(), "training", training);
  return one;
}

}  // namespace

const std::vector<Row>& vision_rows() {
  static const std::vector<Row> rows = {{"conv2d", conv2d},
                                        {"stem_convolution", stem_convolution},
                                        {"pooled_linear", pooled_linear},
                                        {"channel_scale", channel_scale},
                                        {"cross_entropy", cross_entropy},
                                        {"batch_norm", batch_norm}};
  return rows;
}

}  // namespace differential
