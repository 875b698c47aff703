// SPDX-License-Identifier: Apache-2.0
// SyncBatchNorm compared with BatchNorm on the concatenation of all ranks' inputs.
#include "ddp/reduce/sync_batch_norm.hpp"
#include "ddp/ops/vision.hpp"
#include "ddp/reduce/join.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "support/partly_used_ops.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct Case {
  at::MemoryFormat format;
  at::ScalarType dtype;
  std::optional<double> momentum;
  double tolerance;
};

// Rank r has r + 1 images; with `empty` and several ranks, rank 0 has none.
int64_t images_of(int r, bool empty) {
  return empty && r == 0 && world() > 1 ? 0 : r + 1;
}

torch::Tensor images(int r, const Case& c, bool empty, int64_t seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed * 10 + r));
  auto x = torch::randn({images_of(r, empty), 6, 3, 4}, generator).to(context().device());
  return (x * (r + 1) + r).to(c.dtype).contiguous(c.format);  // other mean and spread on each rank
}

void require_close(const torch::Tensor& actual, const torch::Tensor& expected, double tolerance) {
  REQUIRE(actual.sizes() == expected.sizes());
  if (actual.numel() > 0) {
    const double difference =
        (actual.to(torch::kFloat) - expected.to(torch::kFloat)).abs().max().item<double>();
    const double scale = std::max(1.0, expected.to(torch::kFloat).abs().max().item<double>());
    REQUIRE(difference <= tolerance * scale);
  }
}

void compare(const Case& c, bool empty) {
  auto options = torch::nn::BatchNormOptions(6).momentum(c.momentum);
  SyncBatchNorm norm(6, group(), options);
  torch::nn::BatchNorm2d plain(torch::nn::BatchNorm2dOptions(6).momentum(c.momentum));
  {
    const torch::NoGradGuard no_grad;
    norm->weight.copy_(torch::arange(1, 7));
    norm->bias.copy_(torch::arange(6));
    plain->weight.copy_(norm->weight);
    plain->bias.copy_(norm->bias);
  }
  norm->to(context().device());
  plain->to(context().device());
  for (int step = 0; step < 2; ++step) {
    auto x = images(rank(), c, empty, step).requires_grad_();
    std::vector<torch::Tensor> parts;
    int64_t begin = 0;
    for (int r = 0; r < world(); ++r) {
      parts.push_back(images(r, c, empty, step));
      begin += r < rank() ? parts.back().size(0) : 0;
    }
    auto all = torch::cat(parts).to(torch::kFloat).contiguous(c.format).requires_grad_();
    norm->zero_grad();
    plain->zero_grad();
    auto y = norm->forward(x);
    auto expected = plain->forward(all);
    REQUIRE(y.scalar_type() == c.dtype);
    require_close(y, expected.narrow(0, begin, x.size(0)), c.tolerance);
    // Fixed coefficients, because the gradient of y's sum would cancel to zero.
    const auto coefficients =
        torch::arange(all.numel(), on_device()).to(torch::kFloat).cos().view(all.sizes());
    (y.to(torch::kFloat) * coefficients.narrow(0, begin, x.size(0))).sum().backward();
    (expected * coefficients).sum().backward();
    require_close(x.grad(), all.grad().narrow(0, begin, x.size(0)), c.tolerance * 10);
    require_close(norm->running_mean, plain->running_mean, 1e-4);
    require_close(norm->running_var, plain->running_var, 1e-4);
    // Each rank holds a share of the weight's and bias's gradients; the shares sum to the whole.
    auto sums = torch::cat({norm->weight.grad(), norm->bias.grad()});
    group()->all_reduce(sums)->wait();
    require_close(sums, torch::cat({plain->weight.grad(), plain->bias.grad()}), c.tolerance * 10);
  }
  REQUIRE(norm->num_batches_tracked.item<int64_t>() == 2);
}

}  // namespace

TEST_CASE("SyncBatchNorm equals BatchNorm on the concatenation, with unequal and empty shares") {
  // float32: sums in another order round differently. bf16 and fp16: one rounding of the output,
  // 2^-8 and 2^-11; both sides share the statistics of rounded inputs.
  const std::vector<Case> cases = {
      {at::MemoryFormat::Contiguous, torch::kFloat, 0.1, 1e-5},
      {at::MemoryFormat::ChannelsLast, torch::kFloat, 0.1, 1e-5},
      {at::MemoryFormat::Contiguous, torch::kFloat, std::nullopt, 1e-5},
      {at::MemoryFormat::ChannelsLast, torch::kBFloat16, 0.1, 8e-3},
      {at::MemoryFormat::Contiguous, torch::kHalf, 0.1, 1e-3},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const bool empty : {false, true}) {
      CAPTURE(i, empty);
      compare(cases[i], empty);
    }
  }
}

TEST_CASE("SyncBatchNorm with each of BatchNorm's options equals BatchNorm") {
  const bool affine = GENERATE(true, false);
  const bool tracks = GENERATE(true, false);
  const auto momentum = GENERATE(std::optional<double>(0.1), std::optional<double>());
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble);
  for (const bool has_pixels : {true, false}) {
    CAPTURE(affine, tracks, momentum.has_value(), dtype, has_pixels);
    const auto options =
        torch::nn::BatchNormOptions(6).affine(affine).track_running_stats(tracks).momentum(
            momentum);
    SyncBatchNorm norm(6, group(), options);
    norm->to(context().device(), dtype);
    // Equal inputs on all ranks have the statistics of one rank's input.
    const auto x =
        torch::randn(has_pixels ? std::vector<int64_t>{5, 6, 3, 4} : std::vector<int64_t>{5, 6},
                     at::detail::createCPUGenerator(3))
            .to(context().device(), dtype);
    const auto coefficients = torch::arange(x.numel(), on_device()).to(dtype).cos().view_as(x);
    const auto check = [&](auto plain) {
      plain->to(context().device(), dtype);
      const double tolerance = dtype == torch::kDouble ? 1e-12 : 1e-4;
      for (const bool trains : {true, false}) {
        norm->train(trains);
        plain->train(trains);
        if (tracks && !trains) {  // the unbiased variance is one of more values
          plain->running_var.copy_(norm->running_var);
        }
        auto mine = x.clone().requires_grad_();
        auto theirs = x.clone().requires_grad_();
        (norm->forward(mine) * coefficients).sum().backward();
        (plain->forward(theirs) * coefficients).sum().backward();
        CHECK(torch::allclose(mine.grad(), theirs.grad(), tolerance, tolerance));
        CHECK(torch::allclose(norm->forward(x), plain->forward(x), tolerance, tolerance));
        CHECK(norm->weight.defined() == affine);
        if (affine) {
          CHECK(torch::allclose(norm->weight.grad(), plain->weight.grad(), tolerance, tolerance));
        }
        if (tracks) {
          const double spread = has_pixels ? 1.0 + 1.0 / 59 : 1.25;  // of unbiased variances
          CHECK(torch::allclose(norm->running_mean, plain->running_mean, tolerance, tolerance));
          CHECK(torch::allclose(norm->running_var, plain->running_var, spread - 1, tolerance));
        }
      }
    };
    if (has_pixels) {
      check(torch::nn::BatchNorm2d(options));
    } else {
      check(torch::nn::BatchNorm1d(options));
    }
    CHECK(norm->fusable_layer().has_value() == (affine && tracks && momentum.has_value()));
    CHECK(norm->clone()->named_parameters().size() == norm->named_parameters().size());
  }
}

namespace {

/// Number of ops that a model's norms call. The last two use ATen's ops in each dtype.
constexpr int kForms = 7;

ops::Fork fused(int form, const torch::Tensor& x, const torch::Tensor& z,
                const ops::BatchNormLayer& bn, const ops::BatchNormLayer& bn_z) {
  switch (form) {
    case 0:
      return {ops::batch_norm_relu(x, bn), {}};
    case 1:
      return ops::batch_norm_add_relu(x, bn, z);
    case 2:
      return ops::batch_norm_add_relu(x, bn, z, bn_z);
    case 3:
      return ops::batch_norm_relu_max_pool(x, bn);
    case 4:
      return ops::batch_norm_relu_fork(x, bn);
    case 5:
      return {ops::batch_norm_silu(x, bn), {}};
    default:
      return {ops::batch_norm(x, bn), {}};
  }
}

double relative_error(const torch::Tensor& actual, const torch::Tensor& expected) {
  const auto reference = expected.to(torch::kDouble);
  return ((actual.to(torch::kDouble) - reference).norm() / reference.norm()).item<double>();
}

constexpr int64_t kChannels = 16;

torch::Tensor fused_image(int r, int seed, torch::Dtype dtype, bool empty) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed * 10 + r));
  const auto x = torch::randn({3 * images_of(r, empty), kChannels, 7, 7}, generator);
  return (x.to(on_device()) * (r + 1) + r).to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
}

torch::Tensor all_images(int seed, torch::Dtype dtype, bool empty) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < world(); ++r) {
    parts.push_back(fused_image(r, seed, dtype, empty).to(torch::kFloat));
  }
  return torch::cat(parts).requires_grad_();
}

SyncBatchNorm make_norm() {
  SyncBatchNorm norm(kChannels, group());
  {
    const torch::NoGradGuard no_grad;
    norm->weight.copy_(torch::linspace(-1.5, 2.25, kChannels));  // one weight is zero
    norm->bias.copy_(torch::linspace(-1, 1, kChannels));
  }
  norm->to(on_device().device());
  return norm;
}

/// The same layer for one process.
ops::BatchNormLayer alone(const SyncBatchNorm& of) {
  auto layer = *of->fusable_layer();
  for (auto* tensor : {&layer.weight, &layer.bias}) {
    *tensor = tensor->detach().clone().requires_grad_();
  }
  layer.running_mean = layer.running_mean.clone();
  layer.running_var = layer.running_var.clone();
  layer.exchange = nullptr;
  return layer;
}

void compare_fused(int form, torch::Dtype dtype, double tolerance, bool empty) {
  const auto norm = make_norm(), norm_z = make_norm();
  const auto plain = alone(norm), plain_z = alone(norm_z);
  const auto x = fused_image(rank(), 1, dtype, empty).requires_grad_();
  const auto z = fused_image(rank(), 2, dtype, empty).requires_grad_();
  const auto x_all = all_images(1, dtype, empty), z_all = all_images(2, dtype, empty);
  const auto got = fused(form, x, z, *norm->fusable_layer(), *norm_z->fusable_layer());
  const auto wanted = fused(form, x_all, z_all, plain, plain_z);

  int64_t begin = 0;
  for (int r = 0; r < rank(); ++r) {
    begin += 3 * images_of(r, empty);
  }
  const auto mine = [&](const torch::Tensor& of) { return of.narrow(0, begin, x.size(0)); };
  const auto coefficients = torch::arange(wanted.branch.numel(), on_device())
                                .to(torch::kFloat)
                                .cos()
                                .view(wanted.branch.sizes());
  const auto loss = [&](const ops::Fork& fork, const torch::Tensor& weights) {
    auto sum = (fork.branch.to(torch::kFloat) * weights).sum();
    return !fork.shortcut.defined()
               ? sum
               : sum + (fork.shortcut.to(torch::kFloat) * weights.square()).sum();
  };
  loss(got, mine(coefficients)).backward();
  loss(wanted, coefficients).backward();

  const auto check = [&](const torch::Tensor& actual, const torch::Tensor& expected, double bound) {
    REQUIRE(actual.sizes() == expected.sizes());
    if (actual.numel() > 0) {
      REQUIRE(relative_error(actual, expected) <= bound);
    }
  };
  check(got.branch, mine(wanted.branch), tolerance);
  check(x.grad(), mine(x_all.grad()), 2 * tolerance);
  if (form == 1 || form == 2) {
    check(z.grad(), mine(z_all.grad()), 2 * tolerance);
  }
  check(norm->running_mean, plain.running_mean, 1e-4);
  check(norm->running_var, plain.running_var, 1e-4);
  auto sums = torch::cat({norm->weight.grad(), norm->bias.grad()});
  auto expected = torch::cat({plain.weight.grad(), plain.bias.grad()});
  if (form == 2) {
    sums = torch::cat({sums, norm_z->weight.grad(), norm_z->bias.grad()});
    expected = torch::cat({expected, plain_z.weight.grad(), plain_z.bias.grad()});
    check(norm_z->running_var, plain_z.running_var, 1e-4);
  }
  group()->all_reduce(sums)->wait();
  check(sums, expected, 2 * tolerance);
}

}  // namespace

TEST_CASE("SyncBatchNorm with what follows it equals BatchNorm on the concatenation") {
  // float32 uses ATen's ops, 16 bits use kernels. These round y once, by 2^-9 or 2^-12, and a
  // gradient twice.
  std::vector<std::pair<torch::Dtype, double>> dtypes = {{torch::kFloat, 1e-5}};
  if (on_device().device().is_cuda()) {
    dtypes.insert(dtypes.end(), {{torch::kBFloat16, 0x1p-7}, {torch::kHalf, 0x1p-10}});
  }
  for (const auto& [dtype, tolerance] : dtypes) {
    for (int form = 0; form < kForms; ++form) {
      for (const bool empty : {false, true}) {
        CAPTURE(form, dtype, empty);
        compare_fused(form, dtype, tolerance, empty);
      }
    }
  }
}

TEST_CASE("where a rank's vectors lie does not choose the way that its ranks exchange") {
  const auto dtype = on_device().device().is_cuda() ? torch::kBFloat16 : torch::kFloat;
  const auto x = fused_image(rank(), 1, dtype, false), z = fused_image(rank(), 2, dtype, false);
  for (int form = 0; form < kForms; ++form) {
    CAPTURE(form);
    auto norm = make_norm(), norm_z = make_norm(), odd = make_norm(), odd_z = make_norm();
    for (auto* tensor : {&odd->weight, &odd->running_var, &odd_z->bias, &odd_z->running_mean}) {
      if (rank() == world() - 1) {
        const auto place = torch::empty({kChannels + 1}, on_device()).narrow(0, 1, kChannels);
        place.copy_(tensor->detach());
        tensor->set_data(place);
      }
    }
    const auto wanted = fused(form, x, z, *norm->fusable_layer(), *norm_z->fusable_layer());
    const auto got = fused(form, x, z, *odd->fusable_layer(), *odd_z->fusable_layer());
    CHECK(torch::equal(got.branch, wanted.branch));
    CHECK(torch::equal(odd->running_var, norm->running_var));
    CHECK(torch::equal(odd_z->running_mean, norm_z->running_mean));
  }
}

TEST_CASE("a batch without rows on any rank leaves the running estimates") {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    if (dtype == torch::kBFloat16 && !on_device().device().is_cuda()) {
      continue;
    }
    SyncBatchNorm norm(8, group());
    norm->to(on_device().device());
    norm->running_mean.fill_(3);
    norm->running_var.fill_(5);
    const auto x = torch::zeros({0, 8, 2, 2}, on_device().dtype(dtype))
                       .contiguous(at::MemoryFormat::ChannelsLast)
                       .requires_grad_();
    ops::batch_norm_relu(x, *norm->fusable_layer()).sum().backward();
    norm->forward(x).sum().backward();
    CHECK(norm->running_mean.eq(3).all().item<bool>());
    CHECK(norm->running_var.eq(5).all().item<bool>());
    CHECK(norm->weight.grad().eq(0).all().item<bool>());
  }
}

TEST_CASE("what SyncBatchNorm cannot take is a mistake in settings inside a model, too") {
  SyncBatchNorm norm(8, group());
  norm->to(on_device().device());
  const auto wide = torch::ones({2, 16, 1, 1}, on_device());
  const auto single = torch::ones({1, 8, 1, 1}, on_device());
  for (int form = 0; form < kForms; ++form) {
    CAPTURE(form);
    const auto run = [&](const torch::Tensor& x) {
      const auto layer = *norm->fusable_layer();
      fused(form, x, x, layer, layer);
    };
    norm->train();
    CHECK_THROWS_AS(run(wide), SettingsError);
    CHECK_THROWS_AS(run(wide.select(0, 0).select(0, 0)), SettingsError);
    if (world() == 1) {
      CHECK_THROWS_AS(run(single), SettingsError);
    }
    norm->eval();
    CHECK_THROWS_AS(run(wide), SettingsError);
  }
}

TEST_CASE("SyncBatchNorm in eval mode is not collective") {
  const bool has_estimates = GENERATE(true, false);  // otherwise it uses the batch's statistics
  const auto options = torch::nn::BatchNormOptions(6).track_running_stats(has_estimates);
  SyncBatchNorm norm(6, group(), options);
  torch::nn::BatchNorm2d plain(options);
  norm->to(context().device());
  plain->to(context().device());
  norm->eval();
  plain->eval();
  if (rank() == 0) {
    const auto x = integers({2, 6, 3, 3}, 3);
    REQUIRE(torch::equal(norm->forward(x), plain->forward(x)));
  }
  REQUIRE_THROWS_AS(norm->forward(torch::ones({2, 5, 3, 3}, on_device())), SettingsError);
}

TEST_CASE("join refuses a SyncBatchNorm model and runs it with empty shares instead") {
  torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6),
                            torch::nn::Linear(6, 1));
  net->to(context().device());
  convert_sync_batchnorm(*net, group());
  DistributedDataParallel model(net.ptr(), group());
  REQUIRE_THROWS_WITH(join(model, [] {}), Catch::Contains("has_batch"));

  int step = 0;
  int steps_run = 0;
  join(
      model,
      [&](bool mine) {
        model.zero_grad();
        auto x = mine ? batch_of(rank(), step, 4) : torch::zeros({0, 4}, on_device());
        auto y = model.forward(x);
        model.weighted_backward(y.sum(), static_cast<double>(x.size(0)));
        REQUIRE(net->named_parameters()["0.weight"].grad().isfinite().all().item<bool>());
        step += mine ? 1 : 0;
        ++steps_run;
      },
      [&] { return step < 2 + rank(); });
  REQUIRE(steps_run == 1 + world());
}

TEST_CASE("a rank whose loss gives fused norms no gradient still joins the others' sums") {
  const auto gradients = [](int form, bool has_gradient) {
    SyncBatchNorm norm(8, group());
    norm->to(context().device());
    const auto layer = *norm->fusable_layer();
    const auto x = torch::randn({2, 8, 6, 6}, at::detail::createCPUGenerator(5 + rank()))
                       .to(context().device(), torch::kFloat)
                       .contiguous(at::MemoryFormat::ChannelsLast)
                       .requires_grad_();
    const auto y = form == 0   ? ops::batch_norm_relu(x, layer)
                   : form == 1 ? ops::batch_norm_add_relu(x, layer, x.detach()).branch
                               : ops::batch_norm_relu_max_pool(x, layer).branch;
    // Zeros are what a rank without a gradient adds to the sums.
    (rank() > 0 ? y.square().sum()
     : has_gradient
         ? (y * 0).sum()
         : torch::zeros({}, on_device().requires_grad(true)) + partly_used::NoGradient::apply(y))
        .backward();
    return x.grad();
  };
  for (const int form : {0, 1, 2}) {
    CAPTURE(form);
    const auto wanted = gradients(form, true), got = gradients(form, false);
    if (rank() > 0) {
      REQUIRE(torch::equal(got, wanted));
    } else {
      REQUIRE((!got.defined() || got.isfinite().all().item<bool>()));
    }
  }
}
