// SPDX-License-Identifier: Apache-2.0
#include "core/launch/slurm_hostlist.hpp"

#include <sys/resource.h>

#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace ddp::detail {
namespace {

std::vector<std::string> expand(const std::string& text) {
  std::vector<std::string> hosts;
  for (int64_t i = 0; i < count_hosts(text, "LIST"); ++i) {
    hosts.push_back(host_at(text, i, "LIST"));
  }
  return hosts;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("hostlists expand as scontrol show hostnames does") {
  CHECK(expand("node7") == Names{"node7"});
  CHECK(expand("n[01-03,7]") == Names{"n01", "n02", "n03", "n7"});
  CHECK(expand("a,b[2-3],c") == Names{"a", "b2", "b3", "c"});
  CHECK(expand("n[9-11]") == Names{"n9", "n10", "n11"});
  CHECK(expand("r[1-2]n[1-2]-ib") == Names{"r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"});
  CHECK(expand("n[098-101]") == Names{"n098", "n099", "n100", "n101"});
}

TEST_CASE("a hostlist's numbers cost neither time nor memory") {
  rusage before{};
  getrusage(RUSAGE_SELF, &before);
  CHECK(count_hosts("n[0-999999999]", "LIST") == 1'000'000'000);
  CHECK(host_at("n[0-999999999]", 999'999'999, "LIST") == "n999999999");
  CHECK(parse_tasks_per_node("1(x1000000000),2", 1'000'000'000, "TASKS").on_node == 2);
  rusage after{};
  getrusage(RUSAGE_SELF, &after);
  CHECK(after.ru_maxrss - before.ru_maxrss < 8 * 1024);  // KiB
}

TEST_CASE("malformed hostlists are refused by name") {
  const std::vector<std::string> bad = {"",
                                        ",",
                                        "a,",
                                        "a,,b",
                                        "n[1-2",
                                        "n1-2]",
                                        "n[]",
                                        "n[1-]",
                                        "n[-2]",
                                        "n[a-b]",
                                        "n[3-1]",
                                        "n[1,]",
                                        "n[[1]]",
                                        "n[1-2-3]",
                                        "n[1-99999999999]",
                                        "n[0-4294967295]",
                                        "a[0-99999]b[0-99999]",
                                        std::string(70'000, 'x')};
  for (const std::string& text : bad) {
    INFO(text.substr(0, 40));
    CHECK_THROWS_AS(count_hosts(text, "LIST"), SettingsError);
  }
  CHECK_THROWS_WITH(count_hosts("n[3-1]", "LIST"),
                    "LIST='n[3-1]' cannot be read: the range '3-1' runs backwards; Slurm sets this "
                    "variable, do not change it");
  CHECK_THROWS_AS(host_at("n[1-2]", 2, "LIST"), SettingsError);
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
}

}  // namespace ddp::detail
