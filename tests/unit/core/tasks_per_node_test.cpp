// SPDX-License-Identifier: Apache-2.0
#include "core/launch/tasks_per_node.hpp"

#include <sys/resource.h>

#include <string>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace ddp::detail {

TEST_CASE("the numbers of a list cost neither time nor memory") {
  rusage before{};
  getrusage(RUSAGE_SELF, &before);
  CHECK(parse_tasks_per_node("1(x1000000000),2", 1'000'000'000, "TASKS").on_node == 2);
  rusage after{};
  getrusage(RUSAGE_SELF, &after);
  CHECK(after.ru_maxrss - before.ru_maxrss < 8 * 1024);  // KiB
}

TEST_CASE("tasks per node") {
  const auto even = parse_tasks_per_node("4(x2)", 1, "TASKS");
  CHECK(even.num_nodes == 2);
  CHECK(even.num_tasks == 8);
  CHECK(even.on_node == 4);
  CHECK(parse_tasks_per_node("4(x2),3,1", 2, "TASKS").on_node == 3);
  CHECK(parse_tasks_per_node("4(x2),3,1", 3, "TASKS").on_node == 1);
  CHECK(parse_tasks_per_node("4(x2),3,1", 3, "TASKS").num_tasks == 12);
  CHECK(parse_tasks_per_node("4(x2)", 2, "TASKS").on_node == 0);
  for (const char* text : {"", "x", "4(x", "4(x)", "4(x0)", "0", "4,", "4(y2)", "-1", "4(x2)3",
                           "4294967295(x4294967295)"}) {
    INFO(text);
    CHECK_THROWS_AS(parse_tasks_per_node(text, 0, "TASKS"), SettingsError);
  }
  CHECK_THROWS_AS(parse_tasks_per_node(std::string(70'000, '1'), 0, "TASKS"), SettingsError);
  CHECK_THROWS_WITH(parse_tasks_per_node("4,", 0, "TASKS"),
                    "TASKS='4,' cannot be read: expected counts such as 4(x2),3; Slurm sets this "
                    "variable, do not change it");
}

}  // namespace ddp::detail
