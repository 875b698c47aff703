// SPDX-License-Identifier: Apache-2.0
// What is live of a bucket, packed and unpacked: on the CPU by ATen, on a GPU by a kernel.
#include "ddp/core/error.hpp"
#include "ddp/ops/conv2d.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "reduce/live_wire.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr ops::Taps kCentre = 1 << 4;
constexpr ops::Taps kCorner = (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8);

// Filters with one, four and nine live taps, between gradients that travel whole.
struct Gradients {
  explicit Gradients(at::ScalarType dtype) {
    bucket.communicator = group().get();
    bucket.buffer = torch::zeros({1 << 17}, on_device().dtype(dtype));
    add({5}, ops::kAllTaps);
    add({24, 16, 3, 3}, kCentre);
    add({40, 72, 3, 3}, kCorner);  // more than a block moves
    add({8, 16, 3, 3}, ops::kAllTaps);
    add({33, 7}, ops::kAllTaps);
    add({8, 3, 3, 3}, kCentre);  // no whole vectors of a tap
    add({3}, ops::kAllTaps);
  }
  void add(const std::vector<int64_t>& sizes, ops::Taps mask) {
    auto made = torch::empty(sizes, bucket.buffer.options());
    if (sizes.size() == 4) {
      made = made.contiguous(at::MemoryFormat::ChannelsLast);
    }
    auto gradient = bucket.buffer.as_strided(sizes, made.strides(), end);
    gradient.copy_(integers(sizes, 10 + static_cast<int64_t>(live.size())));
    end += (gradient.numel() + 31) / 32 * 32;
    bucket.gradients.push_back(gradient);
    live.push_back(mask);
  }
  GradBucket bucket;
  std::vector<ops::Taps> live;
  int64_t end = 0;
};

// Over 1x1 pixels one tap is live.
struct FilterImpl : torch::nn::Module {
  FilterImpl() {
    first = register_parameter("first", integers({8, 8, 3, 3}, 1).contiguous(kLast));
    second = register_parameter("second", integers({8, 8, 3, 3}, 2).contiguous(kLast));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto form =
        x.size(2) == 1 ? ops::Conv2dAlgorithm::Product : ops::Conv2dAlgorithm::Library;
    return ops::conv2d(ops::conv2d(x, first, 1, 1, form), second, 1, 1, form);
  }
  static constexpr auto kLast = at::MemoryFormat::ChannelsLast;
  torch::Tensor first, second;
};
TORCH_MODULE(Filter);

torch::Tensor pixels(int r, int64_t step, int64_t size = 1) {
  return integers({2, 8, size, size}, 1000 * (step + 1) + r);
}

torch::Tensor live_taps_of(const torch::Tensor& gradient, ops::Taps live) {
  const auto rows = gradient.permute({0, 2, 3, 1}).reshape({gradient.size(0), 9, -1});
  std::vector<torch::Tensor> taps;
  for (int tap = 0; tap < 9; ++tap) {
    if (((live >> tap) & 1) != 0) {
      taps.push_back(rows.select(1, tap));
    }
  }
  return torch::stack(taps, 1).flatten();
}

}  // namespace

TEST_CASE("a wire holds the live taps of filters, and everything else whole") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  Gradients given(dtype);
  const auto wire = ddp::detail::LiveWire::make(given.bucket, given.live);
  REQUIRE(wire.has_value());
  wire->pack();
  const auto packed = wire->memory().clone();
  const auto& gradients = given.bucket.gradients;
  const int64_t vector = dtype == at::kFloat ? 4 : 8;
  int64_t at = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    CAPTURE(i);
    const bool cut = i == 1 || i == 2;
    const auto expected = cut                       ? live_taps_of(gradients[i], given.live[i])
                          : gradients[i].dim() == 4 ? gradients[i].permute({0, 2, 3, 1}).flatten()
                                                    : gradients[i].flatten();
    REQUIRE(torch::equal(packed.narrow(0, at, expected.numel()), expected));
    at += (expected.numel() + vector - 1) / vector * vector;
  }
  CHECK(packed.numel() == at);
  wire->memory().zero_();
  wire->pack_by_aten();
  CHECK(torch::equal(wire->memory(), packed));
}

TEST_CASE("what comes off the wire goes to live taps, and dead ones stay as they are") {
  const bool by_aten = GENERATE(false, true);
  Gradients given(at::kFloat);
  const auto wire = ddp::detail::LiveWire::make(given.bucket, given.live);
  REQUIRE(wire.has_value());
  const auto before = given.bucket.buffer.clone();
  wire->pack();
  wire->memory().mul_(3);
  by_aten ? wire->unpack_by_aten() : wire->unpack();
  auto expected = before.clone();
  for (size_t i = 0; i < given.live.size(); ++i) {
    const auto& gradient = given.bucket.gradients[i];
    auto part =
        expected.as_strided(gradient.sizes(), gradient.strides(), gradient.storage_offset());
    if (i != 1 && i != 2) {
      part.mul_(3);
      continue;
    }
    for (int tap = 0; tap < 9; ++tap) {
      if (((given.live[i] >> tap) & 1) != 0) {
        part.select(3, tap % 3).select(2, tap / 3).mul_(3);
      }
    }
  }
  CHECK(torch::equal(given.bucket.buffer, expected));
}

TEST_CASE("a bucket without dead taps has no wire of its own") {
  Gradients given(at::kFloat);
  given.live.assign(given.live.size(), ops::kAllTaps);
  CHECK_FALSE(ddp::detail::LiveWire::make(given.bucket, given.live).has_value());
  CHECK(ddp::detail::live_bytes(900, kCorner) == 400);
  CHECK(ddp::detail::live_bytes(901, ops::kAllTaps) == 901);
}

TEST_CASE("gradients are the mean, with the taps that nobody reads off the wire") {
  Filter module;
  Filter reference;
  DistributedDataParallel model(module, group(), with_cap(GENERATE(25.0, 1.0 / (1 << 20))));
  OptimizerOptions options;
  options.weight_decay = 0.5;
  options.implementation = OptimizerImplementation::Flat;
  options.skip_dead_taps = true;
  auto optimizer = make_optimizer(model, options);
  const auto backward = [&](const torch::Tensor& x) {
    model.zero_grad();
    model.forward(x).sum().backward();
  };
  for (int step = 0; step < 4; ++step) {
    backward(pixels(rank(), step));
    require_equal(grads_of(*module), mean_reference(reference, [&](Filter& plain) {
                    std::vector<torch::Tensor> parts;
                    for (int r = 0; r < world(); ++r) {
                      parts.push_back(pixels(r, step));
                    }
                    return plain->forward(torch::cat(parts)).sum();
                  }));
    optimizer.step(StepScalars{.lr = 0.0});
  }
  const torch::NoGradGuard no_grad;
  model.forward(pixels(rank(), 4, 2));  // an evaluation may read more
  torch::AutoGradMode grad(true);
  backward(pixels(rank(), 5));
  if (world() > 1) {
    CHECK_THROWS_AS(backward(pixels(rank(), 6, 2)), SettingsError);
  }
}

TEST_CASE("a model wrapped anew reduces the taps that an optimizer left behind before") {
  const bool small_first = GENERATE(false, true);  // then nobody uses them before the rebuild
  Filter module;
  Filter reference;
  OptimizerOptions options;
  options.implementation = OptimizerImplementation::Flat;
  for (const bool anew : {false, true}) {
    CAPTURE(small_first, anew);
    DistributedDataParallel model(module, group());
    options.skip_dead_taps = !anew;
    auto optimizer = make_optimizer(model, options);
    for (int step = 0; step < 4; ++step) {
      const int64_t size = anew && (step > 2 || !small_first) ? 2 : 1;
      model.zero_grad();
      model.forward(pixels(rank(), step, size)).sum().backward();
      const auto grads = grads_of(*module);
      optimizer.step(0.0);
      require_equal(grads, mean_reference(reference, [&](Filter& plain) {
                      std::vector<torch::Tensor> parts;
                      for (int r = 0; r < world(); ++r) {
                        parts.push_back(pixels(r, step, size));
                      }
                      return plain->forward(torch::cat(parts)).sum();
                    }));
    }
  }
}

TEST_CASE("chosen buckets are planned for what travels") {
  if (world() == 1) {
    return;
  }
  const bool overlap = GENERATE(false, true);
  Filter module;
  DistributedDataParallel model(module, group(), with_cap(kAutoBuckets));
  OptimizerOptions options;
  options.implementation = OptimizerImplementation::Flat;
  options.skip_dead_taps = true;
  options.overlap_backward = overlap;
  auto optimizer = make_optimizer(model, options);
  for (int step = 0; step < 5; ++step) {
    model.zero_grad();
    model.forward(pixels(rank(), step)).sum().backward();
    optimizer.step(0.0);
  }
  const auto is_planned = [&](int64_t bytes) {
    const auto name = ddp::detail::concat("buckets of 2 gradients, ", bytes, " bytes, hook none");
    return group()->plan().find(name).has_value();
  };
  constexpr int64_t kWhole = 2 * 8 * 8 * 9 * 4;
  CHECK(is_planned(kWhole) == overlap);  // an update beside backward reads buckets whole
  CHECK(is_planned(kWhole / 9));         // of the first time
}
