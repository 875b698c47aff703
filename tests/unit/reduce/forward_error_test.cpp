// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/log/error_text.hpp"
#include "ddp/detail/module_tensors.hpp"
#include "support/catch.hpp"

namespace ddp {

// Outside an anonymous namespace, so that messages are short.
namespace forward_error_test {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool wrong) : is_wrong(wrong) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return is_wrong ? x.view({32, 64, 3, 5, 19}) : norm->forward(x);
  }
  torch::nn::LayerNorm norm{nullptr};
  bool is_wrong;
};
TORCH_MODULE(Block);

struct Net : torch::nn::Module {
  explicit Net(int num_blocks, bool is_wrong) {
    for (int i = 0; i < num_blocks; ++i) {
      body->push_back(Block(is_wrong && i + 1 == num_blocks));
    }
    register_module("body", body);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& x) { return head->forward(body->forward(x)); }
  torch::nn::Sequential body;
  torch::nn::Linear head{5, 2};
};

struct Other : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    if (x.numel() == 0) {
      throw std::runtime_error("empty");
    }
    return x.view({7});
  }
};

}  // namespace forward_error_test

namespace {

using forward_error_test::Net;

template <typename Module>
std::string error_of(Module module, const torch::Tensor& x) {
  try {
    detail::call_forward(module, x);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

}  // namespace

TEST_CASE("an error in a forward names the op and the module") {
  CHECK(
      error_of(std::make_shared<Net>(1, true), torch::zeros({2, 4})) ==
      "shape '[32, 64, 3, 5, 19]' is invalid for input of size 8 (in aten::view in the forward of "
      "body.0 (ddp::forward_error_test::BlockImpl) of ddp::forward_error_test::Net)");
  CHECK(error_of(std::make_shared<Net>(1, false), torch::zeros({2, 4})) ==
        "mat1 and mat2 shapes cannot be multiplied (2x4 and 5x2) (in aten::addmm in the forward of "
        "head "
        "(torch::nn::LinearImpl) of ddp::forward_error_test::Net)");
  CHECK(error_of(std::make_shared<forward_error_test::Other>(), torch::zeros({2, 4})) ==
        "shape '[7]' is invalid for input of size 8 (in aten::view in the forward of "
        "ddp::forward_error_test::Other)");
}

TEST_CASE("modules of one class are listed, the first four of many") {
  const auto place = [](int num_blocks) {
    const auto text = error_of(std::make_shared<Net>(num_blocks, true), torch::zeros({2, 4}));
    return text.substr(text.find("forward of"));
  };
  const std::string block =
      " (ddp::forward_error_test::BlockImpl) of ddp::forward_error_test::Net)";
  CHECK(place(2) == "forward of body.0 or body.1" + block);
  CHECK(place(4) == "forward of body.0, body.1, body.2 or body.3" + block);
  CHECK(place(5) == "forward of one of 5 modules, body.0, body.1, body.2, body.3, …" + block);
}

TEST_CASE("an error that names its place keeps it, and other exceptions stay as they are") {
  struct Inner : torch::nn::Module {
    torch::Tensor forward(const torch::Tensor& x) { return detail::call_forward(net, x); }
    std::shared_ptr<Net> net = std::make_shared<Net>(1, true);
  };
  const auto text = error_of(std::make_shared<Inner>(), torch::zeros({2, 4}));
  CHECK(text.find("Inner") == text.npos);
  CHECK(text.find("body.0 (") != text.npos);
  auto other = std::make_shared<forward_error_test::Other>();
  CHECK_THROWS_WITH(detail::call_forward(other, torch::zeros({0})), "empty");
}

TEST_CASE("frames of an error hold the program's own functions") {
  auto net = std::make_shared<Net>(1, true);
  try {
    detail::call_forward(net, torch::zeros({2, 4}));
    FAIL("no error");
  } catch (const c10::Error& error) {
    const auto frames = detail::frames_of(error);
    const auto own = std::find_if(frames.begin(), frames.end(), [](const auto& frame) {
      return frame.function.find("BlockImpl::forward(") != std::string::npos;
    });
    const auto op = std::find_if(frames.begin(), frames.end(), [](const auto& frame) {
      return frame.function.starts_with("at::_ops::view::call(");
    });
    REQUIRE(own != frames.end());
    CHECK(op < own);
    CHECK(op->place == "libtorch_cpu.so");
    CHECK_FALSE(own->place.empty());
  }
  CHECK(detail::frames_of(c10::Error("of nowhere", nullptr, nullptr)).empty());
}

}  // namespace ddp
