// SPDX-License-Identifier: Apache-2.0
// Rotary positions and SwiGLU of separate tensors against their formulas in float64.
#include "ddp/ops/decoder.hpp"

#include <torch/torch.h>

#include <string>

#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"
#include "support/rotary.hpp"

using ddp::test::rotated;
using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using lm_test::tolerance_of;
using torch::autograd::grad;

namespace {

bool is_from(const torch::Tensor& result, const std::string& function) {
  return result.grad_fn()->name().find(function) != std::string::npos;
}

/// Forward and backward, and that the kernel ran. The gradient of the result is `direction`.
void check_rotary(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin,
                  const torch::Tensor& direction) {
  const auto x2 = reference_of(x.detach()).requires_grad_();
  const auto y = ddp::ops::apply_rotary(x, cos, sin), plain = x.detach() * cos;
  const auto y2 = rotated(x2, cos.to(torch::kDouble), sin.to(torch::kDouble));
  REQUIRE(is_from(y, "ApplyRotary"));
  CHECK(y.scalar_type() == plain.scalar_type());
  CHECK((x.stride(0) == 0 || y.strides() == plain.strides()));
  CHECK(relative_error(y, y2) < tolerance_of(y.scalar_type()));
  const auto own = grad({y}, {x}, {direction.to(y.scalar_type())})[0];
  CHECK(own.scalar_type() == x.scalar_type());
  CHECK(own.strides() == y.strides());
  const auto exact = direction.to(y.scalar_type()).to(torch::kDouble);
  CHECK(relative_error(own, grad({y2}, {x2}, {exact})[0]) < tolerance_of(x.scalar_type()));
}

}  // namespace

TEST_CASE("apply_rotary equals float64 for all layouts") {
  torch::manual_seed(1);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf, torch::kFloat);
  const auto angle_dtype = GENERATE_COPY(dtype, torch::kFloat);
  const int64_t head_dim = GENERATE(2, 10, 16, 80, 128);
  const std::string layout =
      GENERATE("heads first", "positions first", "narrowed", "shifted", "expanded", "odd rows");
  CAPTURE(dtype, angle_dtype, head_dim, layout);
  const int64_t batch = 2, heads = 3, seq = 37;
  torch::Tensor x;
  if (layout == "heads first") {
    x = leaf({batch, heads, seq, head_dim}, dtype);
  } else if (layout == "positions first") {
    x = leaf({batch, seq, heads, head_dim}, dtype).transpose(1, 2);
  } else if (layout == "narrowed") {
    x = leaf({batch, seq, heads, 2 * head_dim}, dtype).transpose(1, 2).narrow(3, 0, head_dim);
  } else if (layout == "shifted") {
    x = leaf({batch * heads * seq * head_dim + 1}, dtype)
            .narrow(0, 1, batch * heads * seq * head_dim);
    x = x.view({batch, heads, seq, head_dim});
  } else if (layout == "expanded") {
    x = leaf({1, heads, 1, head_dim}, dtype).expand({batch, heads, seq, head_dim});
  } else {
    x = leaf({batch, heads, seq, head_dim + 1}, dtype).narrow(3, 0, head_dim);
  }
  const int64_t angle_batch = GENERATE(1, 2);
  const auto cos = torch::randn({angle_batch, 1, seq, head_dim}, torch::kCUDA).to(angle_dtype);
  const auto sin = torch::randn_like(cos);
  check_rotary(x, cos, sin,
               torch::randn({batch, seq, heads, head_dim}, torch::kCUDA).transpose(1, 2));
  check_rotary(x, cos, sin, torch::randn({1, heads, 1, head_dim}, torch::kCUDA).expand_as(x));
  check_rotary(x, cos[0][0], sin[0][0],
               torch::randn({batch, heads, head_dim, seq}, torch::kCUDA).transpose(2, 3));
}

TEST_CASE("apply_rotary leaves to PyTorch what its kernel does not take") {
  const auto x = leaf({2, 3, 8, 16}, torch::kBFloat16);
  const auto angles = torch::randn({8, 16}, torch::kCUDA);
  const auto narrow = angles.to(torch::kBFloat16);
  REQUIRE(is_from(ddp::ops::apply_rotary(x, narrow, narrow), "ApplyRotary"));
  const auto check = [&](const torch::Tensor& value, const torch::Tensor& cos,
                         const torch::Tensor& sin) {
    const auto y = ddp::ops::apply_rotary(value, cos, sin);
    CHECK_FALSE(is_from(y, "ApplyRotary"));
    CHECK(torch::equal(y, rotated(value, cos, sin)));
  };
  check(x[0], narrow, narrow);
  check(x, narrow, angles);
  check(x, narrow.unsqueeze(0).expand({5, 1, 1, 8, 16}), narrow);
  check(x, narrow.narrow(1, 0, 1), narrow);
  check(x, narrow.t().contiguous().t(), narrow);
  check(leaf({2, 3, 8, 16}, torch::kDouble), narrow, narrow);
  check(leaf({2, 3, 16, 8}, torch::kBFloat16).transpose(2, 3), narrow, narrow);
  const auto trained = narrow.clone().requires_grad_();
  check(x, trained, narrow);
  CHECK(grad({ddp::ops::apply_rotary(x, narrow, trained).sum()}, {trained})[0].defined());
}

TEST_CASE("swiglu of separate tensors equals float64 for all layouts") {
  torch::manual_seed(2);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf, torch::kFloat);
  const int64_t width = GENERATE(8, 10, 1000);
  const std::string layout = GENERATE("dense", "halves", "transposed", "shifted", "expanded");
  CAPTURE(dtype, width, layout);
  const auto make = [&]() -> torch::Tensor {
    if (layout == "transposed") {
      return leaf({7, 3, width}, dtype).transpose(0, 1);
    }
    if (layout == "shifted") {
      return leaf({3, 7, width + 8}, dtype).narrow(2, 3, width);
    }
    return layout == "expanded" ? leaf({1, 1, width}, dtype).expand({3, 7, width})
                                : leaf({3, 7, width}, dtype);
  };
  auto gate = make(), up = make();
  if (layout == "halves") {
    const auto both = leaf({3, 7, 2 * width}, dtype).chunk(2, -1);
    gate = both[0], up = both[1];
  }
  const auto gate2 = reference_of(gate.detach()).requires_grad_();
  const auto up2 = reference_of(up.detach()).requires_grad_();
  const auto y = ddp::ops::swiglu(gate, up), y2 = torch::silu(gate2) * up2;
  const bool has_rows = layout != "transposed" && layout != "shifted";
  CHECK(is_from(y, "SeparateSwiglu") == (dtype != torch::kFloat && width % 8 == 0 && has_rows));
  CHECK(y.scalar_type() == dtype);
  CHECK(relative_error(y, y2) < 2 * tolerance_of(dtype));
  const auto direction = torch::randn({7, 3, width}, torch::kCUDA).to(dtype).transpose(0, 1);
  const auto own = grad({y}, {gate, up}, {direction});
  const auto wanted = grad({y2}, {gate2, up2}, {direction.to(torch::kDouble)});
  CHECK(relative_error(own[0], wanted[0]) < 2 * tolerance_of(dtype));
  CHECK(relative_error(own[1], wanted[1]) < 2 * tolerance_of(dtype));
}
