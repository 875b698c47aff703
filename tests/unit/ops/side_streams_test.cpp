// SPDX-License-Identifier: Apache-2.0
// Scopes of side streams without a GPU: they nest, and work runs at once on the CPU's only stream.
// tests/gpu/side_streams_test.cpp has the streams.
#include <torch/torch.h>

#include <thread>

#include "ops/streams/side_streams.hpp"
#include "support/catch.hpp"

using ddp::ops::SideStreams;

TEST_CASE("scopes of side streams restrict the scopes inside them") {
  CHECK(SideStreams::held_bytes_limit() == 0);
  {
    const SideStreams outer(true, 100);
    CHECK(SideStreams::held_bytes_limit() == 100);
    {
      const SideStreams larger(true, 200);
      CHECK(SideStreams::held_bytes_limit() == 100);
      const SideStreams off(false);
      CHECK(SideStreams::held_bytes_limit() == 0);
      const SideStreams in_off(true, 50);
      CHECK(SideStreams::held_bytes_limit() == 0);
    }
    const SideStreams smaller(true, 50);
    CHECK(SideStreams::held_bytes_limit() == 50);
    int64_t of_other_thread = -1;
    std::thread([&] { of_other_thread = SideStreams::held_bytes_limit(); }).join();
    CHECK(of_other_thread == 0);
  }
  CHECK(SideStreams::held_bytes_limit() == 0);
}

TEST_CASE("work for side streams runs at once on a CPU") {
  SideStreams streams;
  const auto x = torch::ones({4}).requires_grad_(true);
  auto counter = torch::zeros({1});
  streams.start(x.device(), [&] { counter += 1; });
  CHECK(counter.item<float>() == 1);
  bool has_run = false;
  ddp::ops::SideTask task(x, [&](const torch::Tensor& input) {
    has_run = true;
    return 3 * input;
  });
  CHECK(has_run);
  const auto y = task.wait();
  y.sum().backward();
  CHECK(torch::equal(y, torch::full({4}, 3.0F)));
  CHECK(torch::equal(x.grad(), torch::full({4}, 3.0F)));
  const auto weight = torch::ones({8, 8, 3, 3});
  ddp::ops::prefetch_filter(weight, 1, 2, 2);
  CHECK_FALSE(SideStreams::find(weight, 1, torch::kFloat).defined());
}
