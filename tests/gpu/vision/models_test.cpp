// SPDX-License-Identifier: Apache-2.0
// The models on a GPU compared with the same models on the CPU.
#include <torch/torch.h>

#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"
#include "support/catch.hpp"

namespace {

double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  const auto reference = b.to(torch::kCPU).to(torch::kFloat64);
  const auto difference = a.to(torch::kCPU).to(torch::kFloat64) - reference;
  return (difference.abs().max() / reference.abs().max()).item<double>();
}

}  // namespace

TEST_CASE("ResNet-18 and 50 give the CPU's logits and gradients on a GPU, in NHWC too") {
  // In float64, because one ReLU flipped by float32 rounding changes some gradients of ResNet-50 by
  // 18 %.
  for (const std::string name : {"resnet18", "resnet50"}) {
    INFO(name);
    torch::manual_seed(3);
    auto on_cpu = models::make_resnet(name, {.num_classes = 10});
    auto on_gpu = models::make_resnet(name, {.num_classes = 10});
    {
      torch::NoGradGuard no_grad;
      for (const auto& item : on_cpu->named_parameters()) {
        on_gpu->named_parameters()[item.key()].copy_(item.value());
      }
    }
    on_cpu->to(torch::kFloat64);
    on_gpu->to(torch::kFloat64);
    on_gpu->to(torch::kCUDA);
    models::to_channels_last(*on_gpu);
    const auto images = torch::randn({8, 3, 64, 64}, torch::kFloat64);
    const auto target = torch::randint(10, {8});
    const auto expected = on_cpu->forward(images);
    const auto logits =
        on_gpu->forward(images.to(torch::kCUDA).contiguous(at::MemoryFormat::ChannelsLast));
    CHECK(relative_difference(logits, expected) < 1e-9);
    torch::cross_entropy_loss(expected, target).backward();
    torch::cross_entropy_loss(logits, target.to(torch::kCUDA)).backward();
    for (const auto& item : on_cpu->named_parameters()) {
      INFO(item.key());
      const auto& grad = on_gpu->named_parameters()[item.key()].grad();
      CHECK(relative_difference(grad, item.value().grad()) < 1e-6);
    }
    CHECK(on_gpu->named_buffers()["bn1.num_batches_tracked"].item<int64_t>() == 1);
  }
}

TEST_CASE("a ResNet trains after its first forward in training mode ran in inference mode") {
  torch::manual_seed(4);
  auto model = models::resnet18({.num_classes = 10});
  model->to(torch::kCUDA);
  models::to_channels_last(*model);
  models::to_half_but_norms(*model, torch::kBFloat16);
  const auto images = torch::randn({8, 3, 64, 64}, torch::kCUDA)
                          .to(torch::kBFloat16)
                          .contiguous(at::MemoryFormat::ChannelsLast);
  {
    const c10::InferenceMode inference;
    model->forward(images);
  }
  CHECK_NOTHROW(model->forward(images).sum().backward());
}

TEST_CASE("ResNet-50 with fused normalisation is as near to float64 as with ATen's ops") {
  // Gradients of bfloat16 networks differ by many per cent from float64 with any ops, so fused ops
  // must only be no worse than plain ones. One forward and backward, batch statistics.
  torch::manual_seed(5);
  auto reference = models::resnet50({.num_classes = 10});
  const auto images = torch::randn({32, 3, 96, 96}, torch::kCUDA);
  const auto target =
      torch::randint(10, {32}, torch::TensorOptions(torch::kCUDA).dtype(torch::kLong));
  struct Result {
    torch::Tensor logits, grads, running;
  };
  const auto run = [&](bool fused, torch::Dtype dtype) {
    auto model = models::resnet50({.num_classes = 10, .fused_ops = fused});
    {
      torch::NoGradGuard no_grad;
      for (const auto& item : reference->named_parameters()) {
        model->named_parameters()[item.key()].copy_(item.value());
      }
    }
    model->to(torch::kCUDA);
    models::to_channels_last(*model);
    if (dtype == torch::kDouble) {
      model->to(dtype);
    } else {
      models::to_half_but_norms(*model, dtype);
    }
    const auto logits = model->forward(images.to(dtype).contiguous(at::MemoryFormat::ChannelsLast));
    torch::cross_entropy_loss(logits.to(torch::kDouble), target).backward();
    std::vector<torch::Tensor> grads, running;
    for (const auto& item : model->named_parameters()) {
      const auto grad = item.value().grad().to(torch::kDouble);
      grads.push_back((grad / grad.norm()).flatten());
    }
    for (const auto& item : model->named_buffers()) {
      running.push_back(item.value().to(torch::kDouble).flatten());
    }
    return Result{logits.detach().to(torch::kDouble), torch::cat(grads), torch::cat(running)};
  };
  const auto exact = run(false, torch::kDouble);
  const auto error = [](const torch::Tensor& a, const torch::Tensor& b) {
    return ((a - b).norm() / b.norm()).item<double>();
  };
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto plain = run(false, dtype);
    const auto fused = run(true, dtype);
    INFO(dtype << ": errors of fused and plain: logits " << error(fused.logits, exact.logits)
               << ", " << error(plain.logits, exact.logits) << "; gradients "
               << error(fused.grads, exact.grads) << ", " << error(plain.grads, exact.grads)
               << "; buffers " << error(fused.running, exact.running) << ", "
               << error(plain.running, exact.running));
    CHECK(error(fused.logits, exact.logits) <= 1.2 * error(plain.logits, exact.logits));
    CHECK(error(fused.grads, exact.grads) <= 1.2 * error(plain.grads, exact.grads));
    CHECK(error(fused.running, exact.running) <= 1.2 * error(plain.running, exact.running));
    CHECK(error(fused.grads, plain.grads) <= 2 * error(plain.grads, exact.grads));
  }
}
