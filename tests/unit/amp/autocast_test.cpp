// SPDX-License-Identifier: Apache-2.0
#include "ddp/amp/amp.hpp"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <stdexcept>

#include "support/catch.hpp"

using ddp::AmpDtype;
using ddp::Autocast;

namespace {

at::ScalarType matmul_dtype() {
  return at::matmul(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
}

int nesting() {
  const int depth = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  return depth;
}

}  // namespace

TEST_CASE("Autocast computes in its dtype inside its scope", "[amp]") {
  CHECK(matmul_dtype() == at::kFloat);
  {
    const Autocast autocast(ddp::AmpOptions{.dtype = AmpDtype::Bf16});
    CHECK(matmul_dtype() == at::kBFloat16);
    CHECK(at::autocast::is_autocast_enabled(at::kCUDA));
    CHECK(at::autocast::get_autocast_dtype(at::kCUDA) == at::kBFloat16);
    {
      const Autocast inner(AmpDtype::Fp16);
      CHECK(matmul_dtype() == at::kHalf);
      const Autocast off(AmpDtype::Off);
      CHECK(matmul_dtype() == at::kFloat);
    }
    CHECK(matmul_dtype() == at::kBFloat16);
  }
  CHECK(matmul_dtype() == at::kFloat);
  CHECK(nesting() == 0);
}

TEST_CASE("Autocast restores what it found, on exceptions too", "[amp]") {
  const at::ScalarType cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const at::ScalarType cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  at::autocast::set_autocast_cache_enabled(false);
  try {
    const Autocast autocast(AmpDtype::Fp16);
    CHECK(at::autocast::is_autocast_cache_enabled());
    throw std::runtime_error("forward failed");
  } catch (const std::runtime_error&) {
  }
  CHECK_FALSE(at::autocast::is_autocast_cache_enabled());
  at::autocast::set_autocast_cache_enabled(true);
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
  CHECK(at::autocast::get_autocast_dtype(at::kCPU) == cpu_dtype);
  CHECK(at::autocast::get_autocast_dtype(at::kCUDA) == cuda_dtype);
  CHECK(nesting() == 0);
}

TEST_CASE("the end of the outermost scope clears the cache of cast weights", "[amp]") {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const at::Tensor input = at::ones({2, 2});
  const auto forward = [&] { return at::matmul(input, weight)[0][0].item<float>(); };
  {
    const Autocast autocast(AmpDtype::Bf16);
    CHECK(forward() == 2.0F);
    { const Autocast inner(AmpDtype::Bf16); }
    weight.detach().fill_(3.0);
    CHECK(forward() == 2.0F);  // the cast is cached; the end of an inner scope keeps it
  }
  const Autocast autocast(AmpDtype::Bf16);
  CHECK(forward() == 6.0F);
}

TEST_CASE("backward of a loss under autocast gives float32 gradients to float32 leaves", "[amp]") {
  const at::Tensor weight = at::ones({4, 3}).requires_grad_();
  at::Tensor loss;
  {
    const Autocast autocast(AmpDtype::Bf16);
    loss = at::linear(at::ones({2, 3}), weight).sum();
  }
  loss.backward();
  CHECK(weight.grad().scalar_type() == at::kFloat);
  CHECK(at::equal(weight.grad(), at::full({4, 3}, 2.0F)));
}
