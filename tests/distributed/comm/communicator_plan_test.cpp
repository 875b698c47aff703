// SPDX-License-Identifier: Apache-2.0
// A communicator's measured plan is equal on all ranks, and a given plan fixes it.
#include <ATen/ATen.h>

#include <string>

#include "comm/string_collectives.hpp"
#include "comm/tuning/algorithm_choices.hpp"
#include "comm/tuning/group_choices.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"
#include "distributed/comm/communicator_test_utils.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"
#include "support/stderr_of.hpp"

using namespace communicator_tests;

namespace {

ddp::CommunicatorPtr fresh() {
  return comm().split(0, comm().rank());
}

// Checks that only rank 0 logs, once, that a plan of "a test" is dropped and which rank mismatches.
void check_told(const std::string& log, const std::string& why) {
  const int num = comm().rank() == 0 ? 1 : 0;
  CAPTURE(log);
  CHECK(testing::num_found(log, "they are measured again") == num);
  CHECK(testing::num_found(log, "the measured choices of a test are of another system (" + why) ==
        num);
}

}  // namespace

TEST_CASE("the table of all_reduce times is one on all ranks, and measured once") {
  const auto group = fresh();
  const auto& table = group->choices().all_reduce_table();
  if (group->world_size() == 1) {
    CHECK(table.empty());
    return;
  }
  REQUIRE(table.rows().size() >= 4);
  const auto text = table.to_json();
  for (const auto& other : ddp::detail::all_gather_string(*group, text)) {
    CHECK(other == text);
  }
  CHECK(group->choices().plan().find("all_reduce").has_value());
  CHECK(group->choices().all_reduce_table().to_json() == text);
}

TEST_CASE("a plan pins the table; rank 0's counts; another system's is dropped") {
  const auto group = fresh();
  if (group->world_size() == 1) {
    return;
  }
  ddp::Plan saved(group->choices().plan().identity());
  saved.set("all_reduce", "[[1024,10.0],[2048,12.0]]");
  group->choices().adopt(group->rank() == 0 ? saved.to_json() : "ignored", "a test");
  CHECK(group->choices().all_reduce_table().to_json() == "[[1024,10.0],[2048,12.0]]");

  auto identity = group->choices().plan().identity();
  identity["world_size"] = "77";
  ddp::Plan foreign(identity);
  foreign.set("all_reduce", "[[1024,99.0,0.0]]");
  const auto log = testing::stderr_of([&] { group->choices().adopt(foreign.to_json(), "a test"); });
  check_told(log, "rank 0: world_size: 77, here ");
  CHECK(group->choices().all_reduce_table().to_json() == "[[1024,10.0],[2048,12.0]]");
  CHECK_THROWS_AS(group->choices().adopt("{", "a test"), ddp::ReadError);
}

TEST_CASE("a plan that fits some ranks only is dropped on all") {
  const auto group = fresh();
  if (group->world_size() == 1) {
    return;
  }
  ddp::Plan saved(group->choices().plan().identity());
  saved.set("all_reduce", "[[1024,10.0],[2048,12.0]]");
  if (group->rank() == group->world_size() - 1) {  // a rank with another library
    auto identity = group->choices().plan().identity();
    identity["cudnn"] = "another";
    group->choices().plan() = ddp::Plan(identity);
  }
  const auto log = testing::stderr_of([&] { group->choices().adopt(saved.to_json(), "a test"); });
  check_told(log, "rank " + std::to_string(group->world_size() - 1) + ": cudnn: ");
  CHECK(group->choices().plan().empty());
  for (const auto& other :
       ddp::detail::all_gather_string(*group, group->choices().plan().empty() ? "y" : "n")) {
    CHECK(other == "y");
  }
}

TEST_CASE("nothing is taken over of a plan that is damaged in part") {
  const auto group = fresh();
  ddp::Plan saved(group->choices().plan().identity());
  saved.set("all_reduce", "[[2048,10.0,0.0],[1024,12.0,0.0]]");
  saved.set("another choice", "1");
  CHECK_THROWS_AS(group->choices().adopt(saved.to_json(), "a test"), ddp::ReadError);
  CHECK(group->choices().plan().empty());
  if (group->rank() == group->world_size() - 1) {  // a rank with another identity
    auto identity = group->choices().plan().identity();
    identity["cudnn"] = "another";
    group->choices().plan() = ddp::Plan(identity);
  }
  if (group->world_size() > 1) {
    CHECK_THROWS_WITH(group->choices().adopt(saved.to_json(), "folder of a test"),
                      Catch::Contains("folder of a test") && Catch::Contains("sizes must ascend"));
    CHECK(group->choices().plan().empty());
  }
}

TEST_CASE("choices of algorithms travel with a plan, all or none, on all ranks") {
  using ddp::ops::detail::ChoiceBook;
  auto& book = ChoiceBook::instance();
  const auto group = fresh();
  ddp::Plan saved(group->choices().plan().identity());
  saved.set("kernels", R"({"a product": [12, 3], "a convolution": [7, 0]})");
  group->choices().adopt(group->rank() == 0 ? saved.to_json() : "ignored", "a test");
  CHECK(book.find("a product", 12) == 3);
  CHECK(book.find("a convolution", 7) == 0);
  CHECK_FALSE(book.find("a product", 11).has_value());  // another number of proposals
  CHECK_FALSE(book.find("another product", 12).has_value());

  for (const auto* damaged : {"[]", R"({"a product": [5, 5]})", R"({"a product": [5, -1]})",
                              R"({"a product": [5]})", R"({"a product": "3"})"}) {
    CAPTURE(damaged);
    ddp::Plan plan(group->choices().plan().identity());
    plan.set("kernels", damaged);
    CHECK_THROWS_WITH(group->choices().adopt(plan.to_json(), "folder of a test"),
                      Catch::Contains("folder of a test") && Catch::Contains("\"kernels\""));
    CHECK(book.find("a product", 12) == 3);
  }

  book.note("a late convolution", 9, 8);
  ddp::Plan kept;
  ddp::detail::save_algorithm_choices(kept);
  const auto version = kept.version();
  const auto choices = ddp::detail::algorithm_choices_from_json(kept.find("kernels").value());
  CHECK((choices == book.all()));
  CHECK(choices.at("a late convolution").chosen == 8);
  CHECK(choices.at("a product").count == 12);
  ddp::detail::save_algorithm_choices(kept);
  CHECK(kept.version() == version);  // nothing new
}

TEST_CASE("a book of choices ends somewhere, and what it holds may change") {
  ddp::ops::detail::ChoiceBook book;
  ddp::ops::detail::MeasuredChoices many;
  for (size_t i = 0; i < book.kMaxNoted; ++i) {
    many["product " + std::to_string(i)] = {4, 1};
  }
  book.note("first", 4, 3);
  book.adopt(many);
  CHECK(book.all().size() == book.kMaxNoted);
  book.note("one more", 4, 0);
  CHECK_FALSE(book.find("one more", 4).has_value());
  book.note("first", 4, 2);
  CHECK(book.find("first", 4) == 2);
}
