// SPDX-License-Identifier: Apache-2.0
#include "comm/tuning/all_reduce_table.hpp"

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

using ddp::AllReduceTable;

namespace {

AllReduceTable table() {
  return AllReduceTable({{1000, 10}, {2000, 12}, {4000, 16}, {8000, 20}});
}

}  // namespace

TEST_CASE("times between and beyond the rows") {
  const auto t = table();
  CHECK(t.microseconds(1) == 10);
  CHECK(t.microseconds(1000) == 10);
  CHECK(t.microseconds(1500) == 11);
  CHECK(t.microseconds(8000) == 20);
  CHECK(t.microseconds(16000) == 28);
  CHECK(AllReduceTable().microseconds(1000) == 0);
  CHECK(AllReduceTable({{1000, 10}}).microseconds(5000) == 10);
}

TEST_CASE("more bytes are never faster, even where a table falls") {
  const AllReduceTable t({{1000, 10}, {2000, 8}});
  CHECK(t.microseconds(1500) == 10);
  CHECK(t.microseconds(9000) == 10);
}

TEST_CASE("a table as text") {
  CHECK(table().to_json() == "[[1000,10.0],[2000,12.0],[4000,16.0],[8000,20.0]]");
  CHECK((AllReduceTable::from_json(table().to_json()).rows() == table().rows()));
  CHECK(AllReduceTable::from_json("[]").empty());
  // Of an earlier version.
  CHECK((AllReduceTable::from_json("[[1000,10.0,0.0],[2000,12.0,9.5]]").rows() ==
         AllReduceTable({{1000, 10}, {2000, 12}}).rows()));
  const auto damaged = GENERATE(as<std::string>(), "", "{}", "[1]", "[[1]]", "[[1,1,1,1]]",
                                "[[0,1]]", "[[10,0]]", "[[10,-1]]", "[[20,1],[10,2]]", "[[1.5,1]]");
  CHECK_THROWS_AS(AllReduceTable::from_json(damaged), ddp::ReadError);
}
