// SPDX-License-Identifier: Apache-2.0
// The ops of language models compared with the same formulas composed by autograd.
#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <utility>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "ops_test.hpp"
#include "support/catch.hpp"
#include "support/partly_used_ops.hpp"

using ops_test::close;
using ops_test::input;
using torch::autograd::grad;

TEST_CASE("linear_cross_entropy equals cross_entropy of a linear layer") {
  torch::manual_seed(1);
  const auto labels = torch::tensor({3, -100, 0, 12, 5, -100, 7}, torch::kLong);
  for (const bool padded : {false, true}) {
    for (const int64_t chunk : {0, 1, 3, 7, 100}) {
      CAPTURE(padded, chunk);
      const auto hidden = input({7, 6}, torch::kFloat);
      auto weight = input({13, 6}, torch::kFloat);
      if (padded) {
        ddp::ops::pad_rows(weight);
        REQUIRE(ddp::ops::padded_rows(weight).size(0) == 128);
      }
      const auto logits = torch::linear(hidden, weight);
      const auto expected = torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, -100);
      const auto result =
          ddp::ops::linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = chunk});
      CHECK(result.loss_sum.item<float>() == Approx(expected.item<float>()).epsilon(1e-6));
      const auto hits = logits.argmax(1).eq(labels).sum().item<int64_t>();
      CHECK(result.num_correct.item<int64_t>() == hits);
      CHECK(result.num_targets.item<int64_t>() == 5);
      const auto grads = grad({result.loss_sum * 0.5}, {hidden, weight});
      const auto wanted = grad({expected * 0.5}, {hidden, weight});
      CHECK(close(grads[0], wanted[0], 1e-5));
      CHECK(close(grads[1], wanted[1], 1e-5));
    }
  }
}

TEST_CASE("a mean over no row has no gradient, as PyTorch's") {
  const int64_t chunk = GENERATE(0, 2);
  auto hidden = torch::randn({5, 8}).requires_grad_(),
       weight = torch::randn({12, 8}).requires_grad_();
  auto bias = torch::randn({12}).requires_grad_();
  const auto labels = torch::full({5}, ddp::ops::kIgnoreIndex, torch::kInt64);
  const auto result =
      ddp::ops::linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = chunk, .bias = bias});
  const auto loss = result.loss_sum / result.num_targets;
  CHECK(loss.isnan().item<bool>());
  loss.backward();
  for (const auto& tensor : {hidden, weight, bias}) {
    CHECK(torch::equal(tensor.grad(), torch::zeros_like(tensor)));
  }
}

TEST_CASE("linear_cross_entropy adds a bias and gives it the gradient of its column") {
  torch::manual_seed(4);
  const auto labels = torch::tensor({3, -100, 0, 12, 5, -100, 7}, torch::kLong);
  for (const bool padded : {false, true}) {
    for (const int64_t chunk : {0, 3}) {
      CAPTURE(padded, chunk);
      const auto hidden = input({7, 6}, torch::kFloat), bias = input({13}, torch::kFloat);
      auto weight = input({13, 6}, torch::kFloat);
      if (padded) {
        ddp::ops::pad_rows(weight);
      }
      const auto logits = torch::linear(hidden, weight, bias);
      const auto expected = torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, -100);
      const auto result = ddp::ops::linear_cross_entropy(hidden, weight, labels,
                                                         {.chunk_tokens = chunk, .bias = bias});
      CHECK(result.loss_sum.item<float>() == Approx(expected.item<float>()).epsilon(1e-6));
      CHECK(result.num_correct.item<int64_t>() ==
            logits.argmax(1).eq(labels).sum().item<int64_t>());
      const auto grads = grad({result.loss_sum * 0.5}, {hidden, weight, bias});
      const auto wanted = grad({expected * 0.5}, {hidden, weight, bias});
      for (std::size_t i = 0; i < 3; ++i) {
        CAPTURE(i);
        CHECK(close(grads[i], wanted[i], 1e-5));
      }
      // A bias that trains over a frozen weight.
      const auto only = ddp::ops::linear_cross_entropy(hidden.detach(), weight.detach(), labels,
                                                       {.chunk_tokens = chunk, .bias = bias});
      CHECK(close(grad({only.loss_sum * 0.5}, {bias})[0], wanted[2], 1e-5));
    }
  }
  const auto hidden = torch::randn({7, 6}), weight = torch::randn({13, 6});
  CHECK_THROWS_AS(
      ddp::ops::linear_cross_entropy(hidden, weight, labels, {.bias = torch::zeros({12})}),
      c10::Error);
}

TEST_CASE("linear_cross_entropy smooths labels and adds the z-loss") {
  torch::manual_seed(5);
  const auto labels = torch::tensor({3, -100, 0, 12, 5, -100, 7}, torch::kLong);
  for (const auto& [smoothing, z] : {std::pair{0.3, 0.0}, {0.0, 0.2}, {0.3, 0.2}, {1.0, 0.0}}) {
    for (const int64_t chunk : {0, 3}) {
      CAPTURE(smoothing, z, chunk);
      const auto hidden = input({7, 6}, torch::kFloat);
      auto weight = input({13, 6}, torch::kFloat);
      ddp::ops::pad_rows(weight);  // the padding takes no share of the target
      const auto logits = torch::linear(hidden, weight);
      const auto log_sums = logits.logsumexp(1).masked_fill(labels.eq(-100), 0);
      const auto expected =
          torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, -100, smoothing) +
          z * log_sums.square().sum();
      const auto result = ddp::ops::linear_cross_entropy(
          hidden, weight, labels,
          {.chunk_tokens = chunk, .label_smoothing = smoothing, .z_loss = z});
      CHECK(result.loss_sum.item<float>() == Approx(expected.item<float>()).epsilon(1e-6));
      const auto grads = grad({result.loss_sum * 0.5}, {hidden, weight});
      const auto wanted = grad({expected * 0.5}, {hidden, weight});
      CHECK(close(grads[0], wanted[0], 1e-5));
      CHECK(close(grads[1], wanted[1], 1e-5));
    }
  }
  const auto hidden = torch::randn({7, 6}), weight = torch::randn({13, 6});
  for (const auto& [smoothing, z] : {std::pair{1.1, 0.0}, {-0.1, 0.0}, {0.0, -1e-4}}) {
    CHECK_THROWS_AS(ddp::ops::linear_cross_entropy(hidden, weight, labels,
                                                   {.label_smoothing = smoothing, .z_loss = z}),
                    c10::Error);
  }
}

TEST_CASE("linear_cross_entropy with smoothed labels is as near to float64 as PyTorch") {
  torch::manual_seed(9);
  constexpr int64_t rows = 64, vocab = 2048;
  // With the identity as weight, the gradient of hidden is that of the logits.
  const auto weight = torch::eye(vocab);
  const auto labels = torch::randint(vocab, {rows}, torch::kLong);
  for (const double smoothing : {0.0, 0.1, 0.5, 1.0}) {
    for (const double offset : {0.0, 40.0}) {
      CAPTURE(smoothing, offset);
      const auto hidden = (torch::randn({rows, vocab}) + offset).requires_grad_();
      const auto of_torch = [&](torch::Dtype dtype) {
        const auto logits = hidden.to(dtype);
        const auto loss =
            torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, -100, smoothing);
        return std::pair{loss, grad({loss}, {hidden.dtype() == dtype ? hidden : logits})[0]};
      };
      const auto [exact_loss, exact] = of_torch(torch::kDouble);
      const auto [plain_loss, plain] = of_torch(torch::kFloat);
      const auto result =
          ddp::ops::linear_cross_entropy(hidden, weight, labels, {.label_smoothing = smoothing});
      const auto own = grad({result.loss_sum}, {hidden})[0];
      const auto error = [&](const torch::Tensor& value, const torch::Tensor& right) {
        return (value.to(torch::kDouble) - right).abs().max().item<double>();
      };
      CHECK(error(own, exact) <= 2 * error(plain, exact) + 1e-12);
      CHECK(error(result.loss_sum, exact_loss) <=
            2 * error(plain_loss, exact_loss) + 1e-6 * exact_loss.item<double>());
    }
  }
}

TEST_CASE("linear_cross_entropy makes only the gradients that are wanted") {
  torch::manual_seed(2);
  const auto labels = torch::tensor({1, 2, 0}, torch::kLong);
  const auto hidden = input({3, 4}, torch::kFloat);
  const auto frozen = torch::randn({5, 4});
  const auto result = ddp::ops::linear_cross_entropy(hidden, frozen, labels);
  result.loss_sum.backward();
  CHECK(hidden.grad().defined());
  CHECK_FALSE(frozen.grad().defined());
  const torch::NoGradGuard no_grad;
  const auto evaluated = ddp::ops::linear_cross_entropy(hidden, frozen, labels);
  CHECK_FALSE(evaluated.loss_sum.requires_grad());
  CHECK(evaluated.loss_sum.item<float>() == result.loss_sum.item<float>());
}

TEST_CASE("linear_cross_entropy of bfloat16 keeps the loss and the gradient of sure labels") {
  torch::manual_seed(3);
  // One logit far above the others: the label's softmax - 1 is far below bfloat16's step at 1.
  auto weight = torch::zeros({64, 32}, torch::kBFloat16);
  weight.select(0, 7).fill_(1);
  weight.requires_grad_(true);
  const auto hidden = torch::full({4, 32}, 0.25, torch::kBFloat16).requires_grad_(true);
  const auto labels = torch::full({4}, 7, torch::kLong);
  const auto result = ddp::ops::linear_cross_entropy(hidden, weight, labels);
  result.loss_sum.backward();
  // logits: 8 for the label, 0 for 63 others.
  const double others = 63 * std::exp(-8.0);
  CHECK(result.loss_sum.item<float>() == Approx(4 * std::log1p(others)).epsilon(1e-4));
  const double miss = -others / (1 + others);
  CHECK(hidden.grad()[0][0].item<float>() == Approx(miss).epsilon(0.01));
}

TEST_CASE("pad_rows keeps values, identity and gradient, and a move takes the memory away") {
  torch::manual_seed(4);
  auto weight = torch::randn({5, 3}).requires_grad_(true);
  const auto before = weight.detach().clone();
  auto handle = weight;
  ddp::ops::pad_rows(handle);
  CHECK(weight.sizes() == torch::IntArrayRef({5, 3}));
  CHECK(weight.is_leaf());
  CHECK(torch::equal(weight, before));
  const auto rows = ddp::ops::padded_rows(weight);
  CHECK(rows.sizes() == torch::IntArrayRef({128, 3}));
  CHECK(rows.narrow(0, 5, 123).abs().max().item<float>() == 0);
  CHECK(rows.data_ptr() == weight.data_ptr());
  const auto moved = weight.detach().clone();
  CHECK(ddp::ops::padded_rows(moved).size(0) == 5);
  // Fewer rows than pad_rows() was given, and slices of larger tensors, are not padded.
  CHECK(ddp::ops::padded_rows(weight.detach().narrow(0, 0, 4)).size(0) == 4);
  CHECK(ddp::ops::padded_rows(torch::zeros({200, 3}).narrow(0, 0, 5)).size(0) == 5);
}

TEST_CASE("joined rows share the parts' memory and pass their gradients on") {
  const auto first = input({2, 3}), second = input({4, 3}), third = input({1, 3});
  const auto values = torch::cat({first, second, third}).detach();
  CHECK(close(ddp::ops::joined_rows({first, second, third}), values));
  ddp::ops::join_rows({first, second, third});
  const auto joined = ddp::ops::joined_rows({first, second, third});
  CHECK(joined.data_ptr() == first.data_ptr());
  CHECK(second.data_ptr() == static_cast<double*>(first.data_ptr()) + 6);
  CHECK(close(joined, values));
  CHECK(second.is_leaf());
  const auto weights = torch::randn_like(joined);
  const auto grads = grad({joined}, {first, second, third}, {weights});
  CHECK(close(grads[0], weights.narrow(0, 0, 2)));
  CHECK(close(grads[1], weights.narrow(0, 2, 4)));
  CHECK(close(grads[2], weights.narrow(0, 6, 1)));
  // Parts in another order are not adjacent, and a frozen part gets no gradient.
  CHECK(close(ddp::ops::joined_rows({second, first}), torch::cat({second, first})));
  const auto frozen = torch::randn({2, 3}, torch::kDouble);
  const auto mixed = ddp::ops::joined_rows({frozen, first});
  CHECK(close(grad({mixed}, {first}, {torch::ones_like(mixed)})[0], torch::ones_like(first)));
  CHECK_THROWS_WITH(ddp::ops::joined_rows({first, input({2, 4})}),
                    Catch::Contains("does not fit the first"));
}

TEST_CASE("swiglu's gradient is right to second order of a finite difference") {
  torch::manual_seed(7);
  const auto gate = input({3, 4}), up = input({3, 4});
  const auto out = ddp::ops::swiglu(torch::cat({gate, up}, 1));
  const auto expected = torch::silu(gate) * up;
  CHECK(close(out, expected));
  const auto weights = torch::randn_like(out);
  const auto grads = grad({out}, {gate, up}, {weights});
  const auto wanted = grad({expected}, {gate, up}, {weights});
  CHECK(close(grads[0], wanted[0]));
  CHECK(close(grads[1], wanted[1]));
  CHECK_THROWS(ddp::ops::swiglu(input({3, 5})));
}

TEST_CASE("rotary embedding turns pairs by position times frequency, and back") {
  torch::manual_seed(8);
  const auto tables = ddp::ops::make_rotary_tables({.head_dim = 4, .theta = 100}, 16, torch::kCPU);
  const auto positions = torch::tensor({0, 1, 5, 9, 2, 15}, torch::kLong).view({2, 3});
  const auto angles = ddp::ops::rotary_angles(tables, positions);
  const auto x = input({2, 3, 2, 4}), key = input({2, 3, 1, 4}), value = input({2, 3, 1, 4});
  const auto qkv = torch::cat({x, key, value}, 2).flatten(2);
  const auto bias = input({16});
  const auto heads = ddp::ops::split_heads(qkv, 2, 1, {.angles = angles, .added_bias = bias});
  const auto out = heads.query;
  for (int64_t i = 0; i < 6; ++i) {
    const auto position = positions.view({-1})[i].item<double>();
    for (int64_t pair = 0; pair < 2; ++pair) {
      const double angle = position * std::pow(100.0, -static_cast<double>(pair) / 2);
      const auto before = x.view({6, 2, 4})[i][1], after = out.view({6, 2, 4})[i][1];
      const double x1 = before[pair].item<double>(), x2 = before[pair + 2].item<double>();
      CHECK(after[pair].item<double>() ==
            Approx(x1 * std::cos(angle) - x2 * std::sin(angle)).margin(1e-5));
      CHECK(after[pair + 2].item<double>() ==
            Approx(x2 * std::cos(angle) + x1 * std::sin(angle)).margin(1e-5));
    }
  }
  // A rotation's gradient is the inverse rotation, which returns the input.
  const auto back = grad({out, heads.key, heads.value}, {x, key, value, bias},
                         {out.detach(), heads.key.detach(), heads.value.detach()});
  CHECK(close(back[0], x, 1e-5));
  CHECK(close(back[1], key, 1e-5));
  CHECK(torch::equal(heads.value, value));
  CHECK(torch::equal(back[2], value));
  CHECK(close(back[3], qkv.flatten(0, 1).sum(0), 1e-5));
  CHECK_FALSE(close(heads.key, key));
  const auto plain = ddp::ops::split_heads(torch::cat({x, key, value}, 2).flatten(2), 2, 1);
  CHECK(torch::equal(plain.query, x));
  CHECK(torch::equal(plain.key, key));
  CHECK_THROWS_WITH(ddp::ops::split_heads(qkv, 3, 1, {.angles = angles}),
                    Catch::Contains("is not [batch"));
}

TEST_CASE("checkpoint gives the same gradients, dropout included, and keeps nothing") {
  const auto w1 = input({6, 6}), w2 = input({6, 6});
  const auto body = [&](const std::vector<torch::Tensor>& in) {
    return torch::linear(torch::dropout(torch::tanh(torch::linear(in[0], w1)), 0.5, true), w2);
  };
  const auto x = input({4, 6});
  const auto run = [&](bool checkpointed) {
    torch::manual_seed(9);
    const auto h = torch::sin(x);
    auto out = checkpointed ? ddp::ops::checkpoint(body, {h}) : body({h});
    out = out + torch::dropout(out, 0.5, true);  // later draws are as without recomputation
    for (auto& leaf : {x, w1, w2}) {
      leaf.mutable_grad() = torch::Tensor();
    }
    out.square().sum().backward();
    const auto next_draw = torch::rand({1}, torch::kDouble);
    return std::vector<torch::Tensor>{out.detach(), x.grad(), w1.grad(), w2.grad(), next_draw};
  };
  const auto plain = run(false), recomputed = run(true);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(plain[i], recomputed[i]));
  }
}

TEST_CASE("checkpoint takes functions with several results") {
  const std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)> body =
      [](const std::vector<torch::Tensor>& in) {
        return std::vector<torch::Tensor>{in[0] * in[0], in[0].argmax(), in[0].sin(), in[0].cos()};
      };
  const auto x = input({3}), y = x.detach().clone().requires_grad_();
  const auto results = ddp::ops::checkpoint(body, {x}), expected = body({y});
  REQUIRE(results.size() == 4);
  (results[0].sum() + 2 * results[3].sum()).backward();  // the third has no part in it
  (expected[0].sum() + 2 * expected[3].sum()).backward();
  CHECK(torch::equal(results[1], expected[1]));
  CHECK_FALSE(results[1].requires_grad());
  CHECK(torch::equal(x.grad(), y.grad()));
}

TEST_CASE("checkpoint runs its function again only in a backward") {
  int runs = 0;
  const auto body = [&](const std::vector<torch::Tensor>& in) {
    ++runs;
    return in[0] * in[1];
  };
  const auto x = input({3}), frozen = torch::randn({3}, torch::kDouble);
  const auto out = ddp::ops::checkpoint(body, {x, frozen});
  CHECK(runs == 1);
  out.sum().backward();
  CHECK(runs == 2);
  CHECK(torch::equal(x.grad(), frozen));
  const torch::NoGradGuard no_grad;
  ddp::ops::checkpoint(body, {x, frozen});
  CHECK(runs == 3);
}

TEST_CASE("checkpoint gives zeros where its result has no gradient, as in PyTorch") {
  const auto x = input({4, 6}), weight = input({6, 6});
  const auto out = ddp::ops::checkpoint(
      [&](const std::vector<torch::Tensor>& in) { return torch::linear(in[0], weight); }, {x});
  ddp::test::partly_used::NoGradient::apply(out).backward();
  // So all ranks take part in the reduction of what the function uses.
  CHECK(weight.grad().eq(0).all().item<bool>());
  CHECK(x.grad().eq(0).all().item<bool>());
}

TEST_CASE("checkpoint refuses backwards that ask for chosen gradients only") {
  const auto x = input({4, 6}), weight = input({6, 6});
  const auto body = [&](const std::vector<torch::Tensor>& in) {
    return torch::linear(in[0], weight);
  };
  const auto refused = Catch::Contains("fix: call backward() without `inputs`");
  const auto loss = [&] { return ddp::ops::checkpoint(body, {x}).sum(); };
  CHECK_THROWS_WITH(grad({loss()}, {x}), refused);
  CHECK_THROWS_WITH(torch::autograd::backward({loss()}, {}, std::nullopt, false, /*inputs=*/{x}),
                    refused);
  CHECK_FALSE(weight.grad().defined());
  CHECK_FALSE(x.grad().defined());
  loss().backward();
  CHECK(weight.grad().defined());
}

TEST_CASE("only the outermost function of a second run may skip its result") {
  std::vector<bool> inner, outer;
  const auto inside = [&](const std::vector<torch::Tensor>& in) {
    inner.push_back(ddp::ops::is_recomputing());
    return in[0] * 2;
  };
  const auto body = [&](const std::vector<torch::Tensor>& in) {
    const auto twice = ddp::ops::checkpoint(inside, {in[0]});
    outer.push_back(ddp::ops::is_recomputing());
    return twice * 3;
  };
  const auto x = input({3});
  ddp::ops::checkpoint(body, {x}).sum().backward();
  CHECK(outer == std::vector<bool>{false, true});
  // In the second run of `body` its result is read, and again when its own backward comes.
  CHECK(inner == std::vector<bool>{false, false, true});
  CHECK_FALSE(ddp::ops::is_recomputing());
  CHECK(close(x.grad(), torch::full_like(x, 6)));
}

TEST_CASE("linear adds a bias and a residual, for both layouts of the weight") {
  torch::manual_seed(2);
  const bool transposed = GENERATE(false, true);
  const auto x = input({2, 3, 6}), bias = input({5}), residual = input({2, 3, 5});
  const auto weight = input(transposed ? torch::IntArrayRef{6, 5} : torch::IntArrayRef{5, 6});
  const auto y =
      ddp::ops::linear(x, weight, {.bias = bias, .residual = residual, .transposed = transposed});
  const auto expected = torch::linear(x, transposed ? weight.t() : weight, bias) + residual;
  CHECK(close(y, expected));
  const auto grads = grad({y.square().sum()}, {x, weight, bias, residual});
  const auto wanted = grad({expected.square().sum()}, {x, weight, bias, residual});
  for (std::size_t i = 0; i < grads.size(); ++i) {
    CHECK(close(grads[i], wanted[i]));
  }
  CHECK(close(ddp::ops::linear(x, weight, {.transposed = transposed}),
              torch::linear(x, transposed ? weight.t() : weight)));
  CHECK_THROWS_WITH(ddp::ops::linear(residual, weight, {.transposed = transposed}),
                    Catch::Contains("does not fit weight"));
  const auto with = [&](const torch::Tensor& added_bias, const torch::Tensor& added) {
    return ddp::ops::linear(x, weight,
                            {.bias = added_bias, .residual = added, .transposed = transposed});
  };
  CHECK_THROWS_WITH(with(input({6}), {}), Catch::Contains("bias [6] does not fit"));
  CHECK_THROWS_WITH(with({}, input({3, 5})), Catch::Contains("residual [3, 5] differs"));
}

TEST_CASE("a weight inside a larger matrix gives hidden its own rows' gradient only") {
  torch::manual_seed(6);
  auto full = torch::randn({128, 8}, torch::kDouble);  // sized as after pad_rows()
  full.narrow(0, 100, 28).fill_(std::nan(""));
  const auto weight = full.narrow(0, 0, 100);
  CHECK(ddp::ops::padded_rows(weight).size(0) == 100);
  const auto labels = torch::randint(100, {5}, torch::kLong);
  for (const int64_t chunk : {0, 2}) {
    CAPTURE(chunk);
    const auto hidden = input({5, 8});
    const auto result =
        ddp::ops::linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = chunk});
    const auto expected =
        torch::cross_entropy_loss(torch::linear(hidden, weight), labels, {}, at::Reduction::Sum);
    CHECK(close(grad({result.loss_sum}, {hidden})[0], grad({expected}, {hidden})[0], 1e-5));
  }
}

TEST_CASE("logits that are NaN count as no hit") {
  const auto weight = torch::randn({13, 6});
  const auto hidden = torch::full({1, 6}, std::nan(""), torch::kFloat);
  for (int64_t label = 0; label < 13; ++label) {
    const auto result =
        ddp::ops::linear_cross_entropy(hidden, weight, torch::full({1}, label, torch::kLong));
    CHECK(result.num_correct.item<int64_t>() == 0);
  }
}

TEST_CASE("a label outside the vocabulary gives NaN") {
  const auto hidden = input({3, 6}, torch::kFloat), weight = input({13, 6}, torch::kFloat);
  for (const int64_t label : {-1, 13}) {
    const auto result = ddp::ops::linear_cross_entropy(
        hidden, weight, torch::tensor({int64_t{1}, label, ddp::ops::kIgnoreIndex}));
    CHECK(std::isnan(result.loss_sum.item<float>()));
    CHECK(grad({result.loss_sum}, {hidden})[0][1].isnan().any().item<bool>());
  }
}

TEST_CASE("norms return their input as the residual") {
  torch::manual_seed(3);
  const auto x = input({4, 6}), weight = input({6}), bias = input({6});
  const auto [normed, residual] = ddp::ops::layer_norm(x, weight, bias, 1e-5);
  CHECK(close(normed, torch::layer_norm(x, {6}, weight, bias, 1e-5)));
  CHECK(residual.equal(x));
  const auto rms = ddp::ops::rms_norm(x, weight, 1e-5);
  CHECK(close(rms.normed, x * torch::rsqrt(x.square().mean(-1, true) + 1e-5) * weight));
  CHECK(rms.residual.equal(x));
  CHECK_THROWS_WITH(ddp::ops::rms_norm(x, input({5}), 1e-5), Catch::Contains("does not fit"));
}

TEST_CASE("the end of a residual branch: bias, dropout, sum and norm") {
  torch::manual_seed(4);
  const auto branch = input({4, 6}), residual = input({4, 6}), added = input({6});
  const auto weight = input({6}), bias = input({6});
  const auto expected = residual + branch + added;
  CHECK(close(ddp::ops::add_branch(branch, residual, {.bias = added}), expected));
  const auto [normed, sum] =
      ddp::ops::add_layer_norm(branch, residual, weight, bias, 1e-5, {.bias = added});
  CHECK(close(sum, expected));
  CHECK(close(normed, torch::layer_norm(expected, {6}, weight, bias, 1e-5)));
  torch::manual_seed(5);
  const auto dropped = ddp::ops::add_branch(branch, residual, {.bias = added, .dropout_p = 0.5});
  torch::manual_seed(5);
  CHECK(close(dropped, residual + torch::dropout(branch + added, 0.5, true)));
  CHECK(close(ddp::ops::gelu(branch, {.bias = added}), torch::gelu(branch + added)));
  CHECK(close(ddp::ops::gelu(branch, {.tanh = true}), torch::gelu(branch, "tanh")));
  CHECK_THROWS_WITH(ddp::ops::gelu(branch, {.bias = input({5})}), Catch::Contains("does not fit"));
  CHECK_THROWS_WITH(ddp::ops::dropout(branch, 1.0), Catch::Contains("below 1"));
  CHECK_THROWS_WITH(ddp::ops::add_branch(branch, input({6})), Catch::Contains("differs"));
  CHECK_THROWS_WITH(ddp::ops::add_layer_norm(branch, {}, weight, bias, 1e-5),
                    Catch::Contains("residual is undefined"));
}
