// SPDX-License-Identifier: Apache-2.0
// The attention kernels on a GPU compared with the definition in float64, and their dropout.
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/amp/amp.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"

using ddp::ops::AttentionBackend;
using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;

namespace {

// Inputs are equal. bfloat16 rounds the weights and the output (2^-9 of each on average); the
// backward also rounds products of two such values.
constexpr double kForwardTolerance = 0.01;
constexpr double kBackwardTolerance = 0.02;
constexpr double kFloatTolerance = 1e-5;

struct Shape {
  int64_t batch, heads, kv_heads, length, head_dim;
};

/// q, k, v as the models pass them: [batch, length, heads, dim] viewed as [batch, heads, …].
std::vector<torch::Tensor> make_inputs(const Shape& s, torch::Dtype dtype) {
  return {leaf({s.batch, s.length, s.heads, s.head_dim}, dtype),
          leaf({s.batch, s.length, s.kv_heads, s.head_dim}, dtype),
          leaf({s.batch, s.length, s.kv_heads, s.head_dim}, dtype)};
}

std::vector<torch::Tensor> references_of(const std::vector<torch::Tensor>& inputs) {
  std::vector<torch::Tensor> result;
  for (const auto& input : inputs) {
    result.push_back(reference_of(input));
  }
  return result;
}

torch::Tensor attend(const std::vector<torch::Tensor>& qkv,
                     const ddp::ops::AttentionOptions& options) {
  return ddp::ops::attention(qkv[0].transpose(1, 2), qkv[1].transpose(1, 2), qkv[2].transpose(1, 2),
                             options);
}

void check_against(const torch::Tensor& out, const std::vector<torch::Tensor>& inputs,
                   const torch::Tensor& expected, const std::vector<torch::Tensor>& references) {
  REQUIRE(out.sizes() == expected.sizes());
  const bool is_float = out.scalar_type() == torch::kFloat;
  CHECK(relative_error(out, expected) < (is_float ? kFloatTolerance : kForwardTolerance));
  const auto direction = torch::randn_like(expected);
  const auto grads = torch::autograd::grad({out}, inputs, {direction.to(out.scalar_type())});
  const auto wanted = torch::autograd::grad({expected}, references, {direction});
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CAPTURE(i);
    CHECK(relative_error(grads[i], wanted[i]) < (is_float ? kFloatTolerance : kBackwardTolerance));
  }
}

const std::vector<AttentionBackend> kAllBackends = {AttentionBackend::Auto, AttentionBackend::Cudnn,
                                                    AttentionBackend::Flash,
                                                    AttentionBackend::Math};

}  // namespace

TEST_CASE("each attention backend has the same gradients under autocast") {
  torch::manual_seed(3);
  for (const auto backend : kAllBackends) {
    CAPTURE(static_cast<int>(backend));
    const auto inputs = make_inputs({2, 4, 4, 33, 64}, torch::kBFloat16);
    const ddp::ops::AttentionOptions options{.backend = backend, .is_causal = false};
    const auto run = [&] {
      const auto out = attend(inputs, options);
      return torch::autograd::grad({out.sum()}, inputs);
    };
    const auto wanted = run();
    const ddp::Autocast autocast(ddp::AmpDtype::Bf16);
    const auto grads = run();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      CHECK(grads[i].scalar_type() == torch::kBFloat16);
      CHECK(relative_error(grads[i], wanted[i]) < kBackwardTolerance);
    }
  }
}

TEST_CASE("each attention backend equals the definition: heads shared, causal or not, any length") {
  torch::manual_seed(1);
  for (const auto backend : kAllBackends) {
    for (const Shape& shape : {Shape{2, 8, 2, 256, 64}, Shape{2, 6, 6, 200, 64},
                               Shape{1, 28, 4, 257, 128}, Shape{3, 4, 1, 16, 32}}) {
      for (const bool causal : {true, false}) {
        CAPTURE(static_cast<int>(backend), shape.heads, shape.kv_heads, shape.length,
                shape.head_dim, causal);
        const auto inputs = make_inputs(shape, torch::kBFloat16);
        const auto references = references_of(inputs);
        check_against(attend(inputs, {.backend = backend, .is_causal = causal}), inputs,
                      attend(references, {.backend = AttentionBackend::Math, .is_causal = causal}),
                      references);
      }
    }
  }
}

namespace {

/// The same heads where kernels may not read 16 bytes at once: behind an offset, at odd distances.
struct Layout {
  std::string name;
  std::function<torch::Tensor(const torch::Tensor&)> place;
};

std::vector<Layout> odd_layouts() {
  const auto filled = [](const torch::Tensor& memory, const torch::Tensor& heads) {
    memory.copy_(heads);
    return memory;
  };
  return {
      {"an offset of one element",
       [=](const torch::Tensor& heads) {
         return filled(torch::empty({heads.numel() + 1}, heads.options())
                           .narrow(0, 1, heads.numel())
                           .view(heads.sizes()),
                       heads);
       }},
      {"odd strides",
       [=](const torch::Tensor& heads) {
         auto sizes = heads.sizes().vec();
         sizes.back() += 3;
         return filled(torch::empty(sizes, heads.options()).narrow(-1, 0, heads.size(-1)), heads);
       }},
      {"positions in front of heads, in a wider projection",
       [=](const torch::Tensor& heads) {  // [batch, heads, len, dim]
         const int64_t width = heads.size(1) * heads.size(3);
         const auto wide = torch::empty({heads.size(0), heads.size(2), width + 5}, heads.options());
         return filled(wide.narrow(2, 2, width)
                           .view({heads.size(0), heads.size(2), heads.size(1), heads.size(3)})
                           .transpose(1, 2),
                       heads);
       }},
      {"a strided last dimension", [=](const torch::Tensor& heads) {
         return filled(torch::empty_like(heads.transpose(-1, -2), torch::MemoryFormat::Contiguous)
                           .transpose(-1, -2),
                       heads);
       }}};
}

}  // namespace

TEST_CASE("attention takes heads and gradients at any offset and stride") {
  torch::manual_seed(30);
  for (const auto dtype : {torch::kHalf, torch::kFloat}) {
    for (const auto backend : kAllBackends) {
      if (dtype == torch::kFloat && backend != AttentionBackend::Auto) {
        continue;
      }
      for (const auto& layout : odd_layouts()) {
        CAPTURE(dtype, static_cast<int>(backend), layout.name);
        std::vector<torch::Tensor> inputs;
        for (int i = 0; i < 3; ++i) {
          inputs.push_back(
              layout.place(torch::randn({2, 3, 19, 40}, torch::kCUDA).to(dtype)).requires_grad_());
        }
        const auto references = references_of(inputs);
        const ddp::ops::AttentionOptions options{.backend = backend};
        const auto run = [](const std::vector<torch::Tensor>& in,
                            const ddp::ops::AttentionOptions& o) {
          // Behind an odd element, the result's gradient is at an odd offset.
          const auto out = ddp::ops::attention(in[0], in[1], in[2], o);
          return torch::cat({out.flatten().narrow(0, 0, 1), out.flatten()});
        };
        check_against(run(inputs, options), inputs,
                      run(references, {.backend = AttentionBackend::Math}), references);
      }
    }
  }
}

TEST_CASE("gradients of other strides follow each other in each attention backend") {
  torch::manual_seed(33);
  for (const auto backend : kAllBackends) {
    const auto inputs =
        std::vector{leaf({3, 2, 49, 64}, torch::kHalf), leaf({3, 1, 45, 64}, torch::kHalf),
                    leaf({3, 1, 45, 64}, torch::kHalf)};
    const ddp::ops::AttentionOptions options{.backend = backend, .is_causal = false};
    const auto direction = torch::randn({3, 2, 49, 64}, torch::kCUDA).to(torch::kHalf);
    std::vector<torch::Tensor> wanted;
    // A plan of the first gradient would read the others at wrong places.
    for (const int64_t gap : {16, 0, 8}) {
      CAPTURE(static_cast<int>(backend), gap);
      const auto memory = torch::full({3, 2, 49, 64 + gap}, 1e3, direction.options());
      const auto grad_out = memory.narrow(3, 0, 64);
      grad_out.copy_(direction);
      const auto out = ddp::ops::attention(inputs[0], inputs[1], inputs[2], options);
      const auto grads = torch::autograd::grad({out}, inputs, {grad_out});
      wanted = wanted.empty() ? grads : wanted;
      for (std::size_t i = 0; i < grads.size(); ++i) {
        CAPTURE(i);
        CHECK(relative_error(grads[i], wanted[i]) < 0.005);
      }
    }
  }
}

TEST_CASE("packed attention takes heads at any offset and stride") {
  torch::manual_seed(31);
  const auto offsets = torch::tensor({0, 7, 8, 20}, torch::kInt).cuda();
  for (const auto& layout : odd_layouts()) {
    CAPTURE(layout.name);
    std::vector<torch::Tensor> inputs;
    for (int i = 0; i < 3; ++i) {
      inputs.push_back(layout.place(torch::randn({1, 4, 20, 24}, torch::kCUDA).to(torch::kHalf))
                           .requires_grad_());
    }
    const auto references = references_of(inputs);
    const auto run = [&](const std::vector<torch::Tensor>& in, AttentionBackend backend) {
      const auto tokens = [](const torch::Tensor& heads) { return heads[0].transpose(0, 1); };
      return ddp::ops::packed_attention(tokens(in[0]), tokens(in[1]), tokens(in[2]), offsets, 12,
                                        {.backend = backend});
    };
    check_against(run(inputs, AttentionBackend::Auto), inputs,
                  run(references, AttentionBackend::Math), references);
  }
}

TEST_CASE("auto serves single queries, single keys and no keys, and cuDNN refuses them by name") {
  torch::manual_seed(32);
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{1, 1}, {1, 9}, {9, 1}}) {
    for (const double p : {0.0, 0.25}) {
      CAPTURE(queries, keys, p);
      const auto q = leaf({2, 4, queries, 64}, torch::kBFloat16);
      const auto k = leaf({2, 2, keys, 64}, torch::kBFloat16);
      const auto out = ddp::ops::attention(q, k, k, {.is_causal = queries == keys, .dropout_p = p});
      out.sum().backward();
      CHECK(q.grad().isfinite().all().item<bool>());
      if (p == 0) {
        const auto expected =
            ddp::ops::attention(reference_of(q), reference_of(k), reference_of(k),
                                {.backend = AttentionBackend::Math, .is_causal = queries == keys});
        CHECK(relative_error(out, expected) < kForwardTolerance);
      }
    }
  }
  const auto one = leaf({2, 4, 1, 64}, torch::kBFloat16);
  CHECK_THROWS_WITH(ddp::ops::attention(one, one, one, {.backend = AttentionBackend::Cudnn}),
                    Catch::Contains("cudnn cannot be used: it needs at least two keys"));
  const auto none = torch::empty({2, 4, 0, 64}, torch::kCUDA).to(torch::kHalf);
  CHECK(ddp::ops::attention(none, none, none).sizes() == none.sizes());
}

TEST_CASE("attention in float32 is as exact as float32, with every kernel that auto takes") {
  torch::manual_seed(6);
  // LibTorch's kernel serves the first two. Shared heads and odd sizes go to the definition.
  for (const Shape& shape : {Shape{2, 6, 6, 200, 64}, Shape{3, 4, 4, 16, 32},
                             Shape{2, 8, 2, 65, 64}, Shape{1, 2, 2, 40, 6}}) {
    for (const bool causal : {true, false}) {
      CAPTURE(shape.heads, shape.kv_heads, shape.length, shape.head_dim, causal);
      const auto inputs = make_inputs(shape, torch::kFloat);
      const auto references = references_of(inputs);
      check_against(attend(inputs, {.is_causal = causal}), inputs,
                    attend(references, {.backend = AttentionBackend::Math, .is_causal = causal}),
                    references);
    }
  }
}

TEST_CASE("a scale of its own is every backend's scale") {
  torch::manual_seed(2);
  for (const auto backend : kAllBackends) {
    CAPTURE(static_cast<int>(backend));
    const auto inputs = make_inputs({2, 4, 2, 128, 64}, torch::kBFloat16);
    const auto references = references_of(inputs);
    check_against(attend(inputs, {.backend = backend, .scale = 0.3}), inputs,
                  attend(references, {.backend = AttentionBackend::Math, .scale = 0.3}),
                  references);
  }
}

TEST_CASE("without gradients the backends give the same") {
  torch::manual_seed(3);
  const torch::NoGradGuard no_grad;
  for (const auto backend : kAllBackends) {
    CAPTURE(static_cast<int>(backend));
    const auto inputs = make_inputs({2, 8, 2, 130, 64}, torch::kBFloat16);
    const auto expected = attend(references_of(inputs), {.backend = AttentionBackend::Math});
    CHECK(relative_error(attend(inputs, {.backend = backend}), expected) < kForwardTolerance);
    // Decoding: one new token that reads all tokens.
    const auto last = inputs[0].narrow(1, 129, 1);
    const auto decoded =
        attend({last, inputs[1], inputs[2]}, {.backend = backend, .is_causal = false});
    CHECK(relative_error(decoded, expected.narrow(2, 129, 1)) < kForwardTolerance);
  }
}

TEST_CASE(
    "packed documents of ragged lengths attend to themselves alone, on every backend that packs") {
  torch::manual_seed(4);
  const std::vector<int64_t> lengths = {1, 77, 128, 3, 200, 64};
  std::vector<int32_t> bounds = {0};
  for (const auto length : lengths) {
    bounds.push_back(bounds.back() + static_cast<int32_t>(length));
  }
  const int64_t tokens = bounds.back();
  const auto offsets = torch::tensor(bounds, torch::kInt).to(torch::kCUDA);
  for (const auto backend :
       {AttentionBackend::Auto, AttentionBackend::Flash, AttentionBackend::Math}) {
    for (const int64_t head_dim : {64, 128}) {
      CAPTURE(static_cast<int>(backend), head_dim);
      const std::vector<torch::Tensor> inputs = {leaf({tokens, 8, head_dim}, torch::kBFloat16),
                                                 leaf({tokens, 2, head_dim}, torch::kBFloat16),
                                                 leaf({tokens, 2, head_dim}, torch::kBFloat16)};
      const auto references = references_of(inputs);
      std::vector<torch::Tensor> alone;  // each document by the unpacked definition
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        std::vector<torch::Tensor> part;
        for (const auto& reference : references) {
          part.push_back(reference.narrow(0, bounds[i], lengths[i]).unsqueeze(0));
        }
        alone.push_back(
            attend(part, {.backend = AttentionBackend::Math}).squeeze(0).transpose(0, 1));
      }
      check_against(ddp::ops::packed_attention(inputs[0], inputs[1], inputs[2], offsets, 200,
                                               {.backend = backend}),
                    inputs, torch::cat(alone, 0), references);
    }
  }
}

TEST_CASE("attention dropout: its share, its scale, new each time, the same again in backward") {
  // All weights are 1 / n and V is the identity, so the output is the dropped weights.
  constexpr int64_t n = 64, batch = 4, heads = 8;
  constexpr double p = 0.25;
  const auto bf16 = torch::TensorOptions().device(torch::kCUDA).dtype(torch::kBFloat16);
  const auto zeros = torch::zeros({batch, heads, n, n}, bf16).requires_grad_(true);
  const auto values = torch::eye(n, bf16).expand({batch, heads, n, n}).contiguous();
  for (const auto backend : kAllBackends) {
    CAPTURE(static_cast<int>(backend));
    const auto v = values.clone().requires_grad_(true);
    const auto run = [&] {
      return ddp::ops::attention(zeros, zeros, v,
                                 {.backend = backend, .is_causal = false, .dropout_p = p});
    };
    torch::manual_seed(5);
    const auto first = run(), second = run();
    torch::manual_seed(5);
    const auto again = run();
    CHECK(torch::equal(first, again));
    CHECK_FALSE(torch::equal(first, second));
    const auto kept = first.detach().ne(0);
    const double share = 1 - kept.to(torch::kDouble).mean().item<double>();
    // Six standard deviations of the share in 131072 draws.
    CHECK(std::abs(share - p) < 6 * std::sqrt(p * (1 - p) / static_cast<double>(kept.numel())));
    const auto weights = first.detach().masked_select(kept).to(torch::kDouble);
    CHECK((weights * (n * (1 - p)) - 1).abs().max().item<double>() < 0.01);
    // dV = (dropped weights)ᵀ dO, with this forward's mask.
    const auto direction = torch::randn({batch, heads, n, n}, torch::kCUDA).to(torch::kBFloat16);
    const auto grad = torch::autograd::grad({first}, {v}, {direction})[0];
    const auto expected = torch::matmul(first.detach().to(torch::kDouble).transpose(2, 3),
                                        direction.to(torch::kDouble));
    CHECK(relative_error(grad, expected) < kBackwardTolerance);
  }
}

TEST_CASE("a kernel refuses what it cannot serve, and auto takes another one there") {
  using Catch::Contains;
  const auto single = torch::randn({1, 2, 16, 32}, torch::kCUDA);
  const auto odd = torch::randn({1, 2, 16, 36}, torch::kCUDA).to(torch::kBFloat16);
  for (const auto backend : {AttentionBackend::Cudnn, AttentionBackend::Flash}) {
    CAPTURE(static_cast<int>(backend));
    CHECK_THROWS_WITH(ddp::ops::attention(single, single, single, {.backend = backend}),
                      Contains("bfloat16"));
    CHECK_THROWS_WITH(ddp::ops::attention(odd, odd, odd, {.backend = backend}),
                      Contains("head_dim"));
  }
  for (const auto& x : {single, odd}) {
    const auto reference = x.to(torch::kDouble);
    CHECK(relative_error(ddp::ops::attention(x, x, x),
                         ddp::ops::attention(reference, reference, reference,
                                             {.backend = AttentionBackend::Math})) <
          kForwardTolerance);
  }
}
