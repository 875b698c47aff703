// SPDX-License-Identifier: Apache-2.0
// Which operation and which reason a failed capture names.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "train/graph/capture_failure.hpp"

namespace {

using ddp::detail::capture_failure;
using ddp::detail::FailingOperation;

std::string failing_operation_of(const std::function<void()>& step) {
  const FailingOperation failing;
  try {
    step();
  } catch (const std::exception&) {
  }
  return failing.names();
}

template <typename Error>
std::string failure(const Error& error, const std::string& operation = {}) {
  return capture_failure(std::make_exception_ptr(error), operation);
}

}  // namespace

TEST_CASE("the operation that threw is named, also in a backward") {
  CHECK(failing_operation_of([] { torch::ones({2}).sum(); }) == "");
  CHECK_THAT(failing_operation_of([] { torch::ones({2}).item(); }),
             Catch::StartsWith("aten::item"));
  CHECK_THAT(
      failing_operation_of([] {
        auto x = torch::ones({2}).requires_grad_();
        const auto y = x * 2;
        y.register_hook([](const at::Tensor& grad) { return grad.matmul(grad.view({1, 2})); });
        y.sum().backward();
      }),
      Catch::Contains("aten::matmul"));
  // The record ends with the object.
  CHECK(failing_operation_of([] {}) == "");
}

TEST_CASE("a failed capture's reason is one short line") {
  CHECK(failure(std::runtime_error("first\nsecond\nthird"), "aten::item") ==
        "aten::item: first second");
  CHECK(failure(std::runtime_error("too long. " + std::string(500, 'x'))).size() == 300);
  CHECK(failure(std::runtime_error("no dot at the end.")) == "no dot at the end");
  const c10::SourceLocation here{__func__, __FILE__, __LINE__};
  CHECK(
      failure(c10::Error(here, "operation not permitted when stream is capturing"), "aten::item") ==
      "aten::item: it waits for the device, or calls something that cannot be captured: "
      "operation not permitted when stream is capturing");
  CHECK(failure(c10::Error(here, "sizes differ")) == "sizes differ");
  CHECK_THAT(failure(c10::OutOfMemoryError(here, "tried to allocate 4 TiB")),
             Catch::StartsWith("out of memory") && Catch::Contains("tried to allocate 4 TiB") &&
                 Catch::Contains("train.cuda_graph=off"));
}
