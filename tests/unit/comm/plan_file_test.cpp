// SPDX-License-Identifier: Apache-2.0
// Writing and reading context.plan_file.
#include "ddp/comm/context.hpp"
#include "ops/shared/choice_book.hpp"
#include "support/catch.hpp"
#include "unit/train/temporary_folder.hpp"

TEST_CASE(
    "a run leaves its choices of algorithms in the plan's file, and the next one takes them") {
  const testing::TemporaryFolder folder;
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cpu;
  options.plan_file = folder.file("plan.json");
  auto& book = ddp::ops::detail::ChoiceBook::instance();
  {
    auto first = ddp::Context::create(options);
    book.note("a product", 5, 4);
    first.close();
  }
  const auto left = testing::read_file(options.plan_file);
  CHECK(left.find("\"a product\"") != std::string::npos);
  book.note("a product", 5, 0);  // as if another choice had been measured
  {
    auto second = ddp::Context::create(options);
    CHECK(book.find("a product", 5) == 4);
    second.close();
  }
  CHECK(testing::read_file(options.plan_file) == left);
}
