// SPDX-License-Identifier: Apache-2.0
// The other ops of language models on a GPU: bfloat16 against float64, dropout in the backward,
// recomputation.
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"

using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using torch::autograd::grad;

namespace {

// Rounding of single bfloat16 results: 2^-9 on average.
constexpr double kBf16Tolerance = 0.01;

torch::Tensor labels_for(int64_t tokens, int64_t vocab) {
  auto labels = torch::randint(vocab, {tokens}, torch::kLong);
  labels.slice(0, 0, tokens, 7).fill_(ddp::ops::kIgnoreIndex);
  return labels.to(torch::kCUDA);
}

torch::Tensor plain_loss(const torch::Tensor& hidden, const torch::Tensor& weight,
                         const torch::Tensor& labels) {
  return torch::cross_entropy_loss(torch::linear(hidden, weight), labels, {}, at::Reduction::Sum,
                                   ddp::ops::kIgnoreIndex);
}

int64_t peak_bytes() {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[kAll].peak;
}

}  // namespace

TEST_CASE("linear_cross_entropy equals float64, padded or not, in chunks or at once") {
  torch::manual_seed(1);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    // Logits are about 1, so rounding to bfloat16 changes each token's loss by about 2^-9.
    const bool is_float = dtype == torch::kFloat;
    const double loss_tolerance = is_float ? 1e-6 : 1e-3;
    const double grad_tolerance = is_float ? 1e-5 : kBf16Tolerance;
    for (const int64_t vocab : {1024, 1001}) {
      for (const bool padded : {false, true}) {
        for (const int64_t chunk : {0, 64, 100}) {
          CAPTURE(is_float, vocab, padded, chunk);
          const auto hidden = leaf({300, 64}, dtype), labels = labels_for(300, vocab);
          auto weight = leaf({vocab, 64}, dtype, 0.125);
          if (padded) {
            ddp::ops::pad_rows(weight);
          }
          const auto h = reference_of(hidden), w = reference_of(weight);
          const auto expected = plain_loss(h, w, labels);
          const auto result =
              ddp::ops::linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = chunk});
          CHECK(relative_error(result.loss_sum, expected) < loss_tolerance);
          if (is_float) {
            const auto hits = torch::linear(h, w).argmax(1).eq(labels).sum().item<int64_t>();
            CHECK(result.num_correct.item<int64_t>() == hits);
          }
          const auto grads = grad({result.loss_sum * 0.5}, {hidden, weight});
          const auto wanted = grad({expected * 0.5}, {h, w});
          CHECK(relative_error(grads[0], wanted[0]) < grad_tolerance);
          CHECK(relative_error(grads[1], wanted[1]) < grad_tolerance);
          CHECK(grads[0].select(0, 0).abs().max().item<float>() == 0);  // an ignored label
        }
      }
    }
  }
}

TEST_CASE("linear_cross_entropy with a bias equals float64, padded or not, in chunks or at once") {
  torch::manual_seed(7);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const bool is_float = dtype == torch::kFloat;
    for (const int64_t vocab : {1024, 1001}) {
      for (const bool padded : {false, true}) {
        for (const int64_t chunk : {0, 100}) {
          CAPTURE(is_float, vocab, padded, chunk);
          const auto hidden = leaf({300, 64}, dtype), labels = labels_for(300, vocab);
          const auto bias = leaf({vocab}, dtype, 0.5);
          auto weight = leaf({vocab, 64}, dtype, 0.125);
          if (padded) {
            ddp::ops::pad_rows(weight);
          }
          const auto h = reference_of(hidden), w = reference_of(weight), b = reference_of(bias);
          const auto expected = torch::cross_entropy_loss(torch::linear(h, w, b), labels, {},
                                                          at::Reduction::Sum, -100);
          const auto result = ddp::ops::linear_cross_entropy(hidden, weight, labels,
                                                             {.chunk_tokens = chunk, .bias = bias});
          CHECK(relative_error(result.loss_sum, expected) < (is_float ? 1e-6 : 1e-3));
          const auto grads = grad({result.loss_sum * 0.5}, {hidden, weight, bias});
          const auto wanted = grad({expected * 0.5}, {h, w, b});
          for (std::size_t i = 0; i < 3; ++i) {
            CAPTURE(i);
            CHECK(relative_error(grads[i], wanted[i]) < (is_float ? 1e-5 : kBf16Tolerance));
          }
        }
      }
    }
  }
}

TEST_CASE("linear_cross_entropy with smoothed labels and z-loss equals float64") {
  torch::manual_seed(8);
  constexpr double smoothing = 0.2, z = 0.01;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    // Half of the row is padding; kept in shared memory; longer than that.
    for (const int64_t vocab : {137, 1001, 70001}) {
      const bool is_float = dtype == torch::kFloat;
      CAPTURE(is_float, vocab);
      const auto hidden = leaf({100, 64}, dtype), labels = labels_for(100, vocab);
      auto weight = leaf({vocab, 64}, dtype, 0.125);
      ddp::ops::pad_rows(weight);
      // Softmax ignores a constant. A mean over the wrong number of logits does not.
      const auto bias = torch::full({vocab}, 1, hidden.options().requires_grad(false));
      const auto h = reference_of(hidden), w = reference_of(weight);
      const auto logits = torch::linear(h, w) + 1;
      const auto is_ignored = labels.eq(ddp::ops::kIgnoreIndex);
      const auto expected =
          torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, -100, smoothing) +
          z * logits.logsumexp(1).square().masked_fill(is_ignored, 0).sum();
      const auto result = ddp::ops::linear_cross_entropy(
          hidden, weight, labels, {.bias = bias, .label_smoothing = smoothing, .z_loss = z});
      CHECK(relative_error(result.loss_sum, expected) < (is_float ? 1e-6 : 1e-3));
      const auto grads = grad({result.loss_sum * 0.5}, {hidden, weight});
      const auto wanted = grad({expected * 0.5}, {h, w});
      CHECK(relative_error(grads[0], wanted[0]) < (is_float ? 1e-5 : kBf16Tolerance));
      CHECK(relative_error(grads[1], wanted[1]) < (is_float ? 1e-5 : kBf16Tolerance));
    }
  }
}

TEST_CASE("linear_cross_entropy is as near to float64 as PyTorch's loss of the same logits") {
  torch::manual_seed(9);
  constexpr int64_t rows = 64, vocab = 1024;
  const auto labels =
      torch::randint(vocab, {rows}, torch::dtype(torch::kLong).device(torch::kCUDA));
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    // With the identity as weight, hidden is the logits, and has their gradient.
    const auto weight = torch::eye(vocab, torch::dtype(dtype).device(torch::kCUDA));
    for (const double smoothing : {0.0, 0.1, 1.0}) {
      for (const double offset : {0.0, 40.0}) {
        for (const bool is_sure : {false, true}) {  // of the labels: the loss is small
          CAPTURE(dtype, smoothing, offset, is_sure);
          auto values = torch::randn({rows, vocab}, torch::kCUDA);
          if (is_sure) {
            values = torch::zeros_like(values).scatter_(1, labels.unsqueeze(1), 12);
          }
          const auto hidden = (values + offset).to(dtype).requires_grad_();
          const auto of_torch = [&](torch::Dtype wide) {
            const auto logits = hidden.detach().to(wide).requires_grad_();
            const auto loss =
                torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, -100, smoothing);
            return std::pair{loss, grad({loss}, {logits})[0]};
          };
          const auto [exact_loss, exact] = of_torch(torch::kDouble);
          const auto [plain_loss, plain] = of_torch(torch::kFloat);
          const auto result = ddp::ops::linear_cross_entropy(hidden, weight, labels,
                                                             {.label_smoothing = smoothing});
          const auto own = grad({result.loss_sum}, {hidden})[0];
          const auto error = [](const torch::Tensor& value, const torch::Tensor& right) {
            return (value.to(torch::kDouble) - right).abs().max().item<double>();
          };
          CHECK(error(own, exact) <= 2 * error(plain.to(dtype), exact) + 1e-7);
          CHECK(error(result.loss_sum, exact_loss) <=
                2 * error(plain_loss, exact_loss) + 2e-6 * exact_loss.item<double>());
        }
      }
    }
  }
}

TEST_CASE("linear_cross_entropy under autocast gives float32 leaves float32 gradients") {
  torch::manual_seed(2);
  const auto hidden = leaf({200, 64}, torch::kFloat), weight = leaf({1001, 64}, torch::kFloat, 0.1);
  const auto labels = labels_for(200, 1001);
  ddp::ops::LinearCrossEntropyResult result;
  {
    const ddp::Autocast autocast(ddp::AmpDtype::Bf16);
    result = ddp::ops::linear_cross_entropy(hidden, weight, labels);
  }
  const auto h = reference_of(hidden), w = reference_of(weight);
  const auto expected = plain_loss(h, w, labels);
  CHECK(relative_error(result.loss_sum, expected) < 1e-3);
  const auto grads = grad({result.loss_sum}, {hidden, weight}), wanted = grad({expected}, {h, w});
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(grads[i].scalar_type() == torch::kFloat);
    CHECK(relative_error(grads[i], wanted[i]) < kBf16Tolerance);
  }
}

TEST_CASE("linear_cross_entropy never holds all logits in float32, and in chunks never all") {
  constexpr int64_t tokens = 16384, vocab = 65536;
  constexpr double logits_bytes = 2.0 * tokens * vocab;  // 2 GiB in bfloat16
  const auto hidden = leaf({tokens, 64}, torch::kBFloat16);
  const auto weight = (torch::randn({vocab, 64}, torch::kCUDA) * 0.1).to(torch::kBFloat16);
  const auto labels = labels_for(tokens, vocab);
  for (const int64_t chunk : {int64_t{0}, int64_t{2048}}) {
    CAPTURE(chunk);
    torch::cuda::synchronize();
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    const auto before = peak_bytes();
    const auto result =
        ddp::ops::linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = chunk});
    const auto extra = static_cast<double>(peak_bytes() - before);
    // A float32 copy would take 3 times the logits' bytes. Chunks take 1/8 of them, plus blocks.
    CHECK(extra < (chunk == 0 ? 1.6 : 0.6) * logits_bytes);
    CHECK(extra > (chunk == 0 ? 1.0 : 0.125) * logits_bytes);
    CHECK(result.loss_sum.item<double>() > 0);
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
}

TEST_CASE("lora_linear drops in the backward what it dropped in the forward") {
  // W = 0, A = B = identity, x = 1: the output is the scaled mask, and so is dx for dy = 1.
  constexpr int64_t n = 256, tokens = 512;
  constexpr double p = 0.125;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto memory = torch::TensorOptions().device(torch::kCUDA).dtype(dtype);
    const auto x = torch::ones({2, tokens / 2, n}, memory).requires_grad_(true);
    const auto a = torch::eye(n, memory).requires_grad_(true);
    const auto b = torch::eye(n, memory).requires_grad_(true);
    const ddp::ops::LoraLinearOptions options = {.scale = 0.5, .dropout_p = p};
    torch::manual_seed(3);
    const auto out = ddp::ops::lora_linear(x, torch::zeros({n, n}, memory), a, b, options);
    const auto next = ddp::ops::lora_linear(x, torch::zeros({n, n}, memory), a, b, options);
    const auto mask = out.detach().ne(0).to(torch::kDouble).view({tokens, n});
    const double share = 1 - mask.mean().item<double>();
    CHECK(std::abs(share - p) < 6 * std::sqrt(p * (1 - p) / static_cast<double>(mask.numel())));
    CHECK_FALSE(torch::equal(out, next));
    const auto expected = mask * (0.5 / (1 - p));
    CHECK(relative_error(out.view({tokens, n}), expected) < kBf16Tolerance);
    const auto grads = grad({out}, {x, a, b}, {torch::ones_like(out)});
    CHECK(relative_error(grads[0].view({tokens, n}), expected) < kBf16Tolerance);
    // dA = uᵀ x' with u = scale: each row holds the scaled mask's column sums. So does dB = dyᵀ t
    // s.
    const auto sums = expected.sum(0).expand({n, n});
    CHECK(relative_error(grads[1], sums) < kBf16Tolerance);
    CHECK(relative_error(grads[2], sums) < kBf16Tolerance);
  }
}

TEST_CASE("lora_linear equals its formula in bfloat16, with adapters in float32 too") {
  torch::manual_seed(4);
  for (const auto adapter_dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto x = leaf({3, 100, 256}, torch::kBFloat16);
    const auto weight = leaf({192, 256}, torch::kBFloat16, 0.06).detach();
    const auto bias = leaf({192}, torch::kBFloat16).detach();
    const auto a = leaf({16, 256}, adapter_dtype, 0.06), b = leaf({192, 16}, adapter_dtype, 0.3);
    const auto out = ddp::ops::lora_linear(x, weight, a, b, {.scale = 2, .bias = bias});
    const auto xr = reference_of(x), ar = reference_of(a), br = reference_of(b);
    const auto expected = torch::linear(xr, weight.to(torch::kDouble), bias.to(torch::kDouble)) +
                          2 * torch::linear(torch::linear(xr, ar), br);
    CHECK(relative_error(out, expected) < kBf16Tolerance);
    const auto direction = torch::randn_like(expected);
    const auto grads = grad({out}, {x, a, b}, {direction.to(torch::kBFloat16)});
    const auto wanted = grad({expected}, {xr, ar, br}, {direction});
    CHECK(grads[1].scalar_type() == adapter_dtype);
    CHECK(grads[2].scalar_type() == adapter_dtype);
    for (std::size_t i = 0; i < 3; ++i) {
      CAPTURE(i);
      CHECK(relative_error(grads[i], wanted[i]) < kBf16Tolerance);
    }
  }
}

TEST_CASE("swiglu equals silu(gate) * up in float64, forward and backward") {
  torch::manual_seed(5);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const double tolerance = dtype == torch::kFloat ? 1e-6 : kBf16Tolerance;
    const auto gate = leaf({64, 1000}, dtype, 2), up = leaf({64, 1000}, dtype);
    const auto g = reference_of(gate), u = reference_of(up);
    const auto out = ddp::ops::swiglu(torch::cat({gate, up}, -1)), expected = torch::silu(g) * u;
    CHECK(relative_error(out, expected) < tolerance);
    const auto direction = torch::randn_like(expected);
    const auto grads = grad({out}, {gate, up}, {direction.to(dtype)});
    const auto wanted = grad({expected}, {g, u}, {direction});
    CHECK(relative_error(grads[0], wanted[0]) < tolerance);
    CHECK(relative_error(grads[1], wanted[1]) < tolerance);
  }
}

TEST_CASE("rotary embedding turns in float32 whatever its input is, and turns back") {
  torch::manual_seed(6);
  const auto tables =
      ddp::ops::make_rotary_tables({.head_dim = 128, .theta = 1e6}, 4096, torch::kCUDA);
  const auto positions = torch::randint(4096, {2, 300}, torch::kLong).to(torch::kCUDA);
  const auto angles = ddp::ops::rotary_angles(tables, positions);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const double tolerance = dtype == torch::kFloat ? 1e-6 : kBf16Tolerance;
    const auto x = leaf({2, 300, 4, 128}, dtype), r = reference_of(x);
    const auto cos = tables.cos.index({positions}).unsqueeze(2).to(torch::kDouble);
    const auto sin = tables.sin.index({positions}).unsqueeze(2).to(torch::kDouble);
    const auto first = r.narrow(-1, 0, 64), second = r.narrow(-1, 64, 64);
    const auto expected = torch::cat({first * cos - second * sin, second * cos + first * sin}, -1);
    const auto heads =
        ddp::ops::split_heads(torch::cat({x, x, x}, 2).flatten(2), 4, 4, {.angles = angles});
    const auto& out = heads.query;
    CHECK(torch::equal(heads.key, out));
    CHECK(torch::equal(heads.value, x));
    CHECK(out.scalar_type() == dtype);
    CHECK(relative_error(out, expected) < tolerance);
    const auto direction = torch::randn_like(expected);
    const auto grads = grad({out}, {x}, {direction.to(dtype)});
    CHECK(relative_error(grads[0], grad({expected}, {r}, {direction})[0]) < tolerance);
  }
}

TEST_CASE("checkpoint repeats the random numbers of a GPU: gradients equal bit for bit") {
  torch::manual_seed(7);
  constexpr int kLayers = 3;
  const auto x = leaf({4, 32, 64}, torch::kBFloat16);
  std::vector<torch::Tensor> leaves = {x};
  for (int i = 0; i < 2 * kLayers; ++i) {
    leaves.push_back(leaf({64, 64}, torch::kBFloat16, 0.2));
  }
  const auto layer = [&](int index) {
    return [w1 = leaves[2 * index + 1],
            w2 = leaves[2 * index + 2]](const std::vector<torch::Tensor>& in) {
      const auto h = torch::dropout(torch::gelu(torch::linear(in[0], w1)), 0.3, true);
      const auto heads = h.view({4, 32, 4, 16}).transpose(1, 2);
      const auto out = ddp::ops::attention(
          heads, heads, heads, {.backend = ddp::ops::AttentionBackend::Math, .dropout_p = 0.2});
      return torch::linear(out.transpose(1, 2).reshape({4, 32, 64}), w2);
    };
  };
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool checkpointed : {false, true}) {
    for (auto& parameter : leaves) {
      parameter.mutable_grad() = torch::Tensor();
    }
    torch::manual_seed(8);
    auto out = torch::sin(x);
    for (int i = 0; i < kLayers; ++i) {
      out = checkpointed && i != 1 ? ddp::ops::checkpoint(layer(i), {out}) : layer(i)({out});
      out = torch::dropout(out, 0.1, true);
    }
    out.to(torch::kFloat).square().sum().backward();
    results.push_back({out.detach(), torch::rand({8}, torch::kCUDA)});
    for (const auto& parameter : leaves) {
      results.back().push_back(parameter.grad().clone());
    }
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(results[0][i], results[1][i]));
    CHECK(results[0][i].abs().max().item<float>() > 0);
  }
}

TEST_CASE("checkpoint repeats what its function draws on the CPU, and leaves the later draws") {
  torch::manual_seed(13);
  const auto x = leaf({4}, torch::kFloat);
  for (int i = 0; i < 20; ++i) {
    const auto out = ddp::ops::checkpoint(
        [](const std::vector<torch::Tensor>& in) {
          return in[0] * torch::rand({}).item<double>() * torch::rand_like(in[0]);
        },
        {x});
    const auto after = torch::rand({4});
    torch::manual_seed(static_cast<uint64_t>(i));
    const auto first = torch::rand({4});
    torch::manual_seed(static_cast<uint64_t>(i));
    x.mutable_grad() = torch::Tensor();
    out.sum().backward();
    CHECK(torch::allclose(x.grad() * x, out));
    CHECK(torch::equal(torch::rand({4}), first));
    CHECK_FALSE(torch::equal(after, first));
  }
}

TEST_CASE("checkpoint repeats the dropout inside every attention kernel") {
  torch::manual_seed(9);
  using ddp::ops::AttentionBackend;
  const auto x = leaf({2, 8, 128, 64}, torch::kBFloat16);
  for (const auto backend :
       {AttentionBackend::Auto, AttentionBackend::Cudnn, AttentionBackend::Flash}) {
    CAPTURE(static_cast<int>(backend));
    const auto body = [&](const std::vector<torch::Tensor>& in) {
      return ddp::ops::attention(in[0], in[0], in[0], {.backend = backend, .dropout_p = 0.5});
    };
    std::vector<torch::Tensor> grads;
    for (const bool checkpointed : {false, true}) {
      torch::manual_seed(10);
      const auto h = x * 1;
      const auto out = checkpointed ? ddp::ops::checkpoint(body, {h}) : body({h});
      x.mutable_grad() = torch::Tensor();
      out.to(torch::kFloat).square().sum().backward();
      grads.push_back(x.grad());
    }
    // The kernels sum dQ in no fixed order; another mask would give an error of about 1.
    CHECK(relative_error(grads[1], grads[0]) < 0.005);
  }
}

TEST_CASE("checkpoint repeats autocast for the CPU and for every input's device") {
  const auto on_cpu = torch::randn({4, 4}).requires_grad_();
  const auto on_gpu = leaf({4, 4}, torch::kFloat);
  for (const bool cpu_first : {false, true}) {
    CAPTURE(cpu_first);
    std::vector<torch::Dtype> dtypes;
    const auto body = [&](const std::vector<torch::Tensor>& in) {
      const auto first = in[0].mm(in[0]), second = in[1].mm(in[1]);
      dtypes.push_back(first.scalar_type());
      dtypes.push_back(second.scalar_type());
      return first.sum().to(torch::kCPU, torch::kFloat) +
             second.sum().to(torch::kCPU, torch::kFloat);
    };
    torch::Tensor out;
    {
      const ddp::Autocast autocast(ddp::AmpDtype::Bf16);
      out = cpu_first ? ddp::ops::checkpoint(body, {on_cpu, on_gpu})
                      : ddp::ops::checkpoint(body, {on_gpu, on_cpu});
    }
    out.backward();
    CHECK(dtypes == std::vector<torch::Dtype>(4, torch::kBFloat16));
  }
}
