// SPDX-License-Identifier: Apache-2.0
#include "comm/all_reduce_table.hpp"

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

using ddp::AllReduceAlgorithm;
using ddp::AllReduceTable;

namespace {

constexpr auto kRing = AllReduceAlgorithm::Ring;
constexpr auto kSymmetric = AllReduceAlgorithm::Symmetric;

// Symmetric is faster below 3000 bytes, ring above. From 5000 on, ring is over 1.5 times as fast.
AllReduceTable table() {
  return AllReduceTable({{1000, 10, 5}, {2000, 12, 9}, {4000, 16, 20}, {8000, 20, 40}});
}

}  // namespace

TEST_CASE("times between and beyond the rows") {
  const auto t = table();
  CHECK(t.microseconds(1, kRing) == 10);
  CHECK(t.microseconds(1000, kSymmetric) == 5);
  CHECK(t.microseconds(1500, kRing) == 11);
  CHECK(t.microseconds(3000, kSymmetric) == 14.5);
  CHECK(t.microseconds(8000, kRing) == 20);
  CHECK(t.microseconds(16000, kRing) == 28);
  CHECK(t.microseconds(16000, kSymmetric) == 80);
  CHECK(AllReduceTable().microseconds(1000, kRing) == 0);
  CHECK(AllReduceTable({{1000, 10, 0}}).microseconds(5000, kRing) == 10);
}

TEST_CASE("more bytes are never faster, even where a table falls") {
  const AllReduceTable t({{1000, 10, 0}, {2000, 8, 0}});
  CHECK(t.microseconds(1500, kRing) == 10);
  CHECK(t.microseconds(9000, kRing) == 10);
}

TEST_CASE("the faster algorithm is taken, few thread blocks where nobody waits") {
  const auto t = table();
  CHECK(t.choose(1000, false) == kSymmetric);
  CHECK(t.choose(4000, false) == kRing);
  CHECK(t.choose(4000, true) == kSymmetric);  // 20 against 16: hidden
  CHECK(t.choose(8000, true) == kRing);       // twice as long
  CHECK(t.choose(1000, false, 4) == kSymmetric);
  CHECK(t.choose(1000, false, 6) == kRing);  // the mean's own kernel costs more
  CHECK(t.microseconds(1000) == 5);
  CHECK(t.microseconds(4000) == 16);
  CHECK(t.microseconds(4000, true) == 20);
  const AllReduceTable ring_only({{1000, 10, 0}, {2000, 12, 0}});
  CHECK_FALSE(ring_only.has_symmetric());
  CHECK(ring_only.choose(1000, true) == kRing);
  CHECK(AllReduceTable().choose(1000, true) == kRing);
}

TEST_CASE("a table as text") {
  CHECK(table().to_json() == "[[1000,10.0,5.0],[2000,12.0,9.0],[4000,16.0,20.0],[8000,20.0,40.0]]");
  CHECK((AllReduceTable::from_json(table().to_json()).rows() == table().rows()));
  CHECK(AllReduceTable::from_json("[]").empty());
  const auto damaged =
      GENERATE(as<std::string>(), "", "{}", "[1]", "[[1,2]]", "[[0,1,1]]", "[[10,0,1]]",
               "[[10,1,-1]]", "[[20,1,1],[10,2,2]]", "[[10,1,1],[20,2,0]]", "[[1.5,1,1]]");
  CHECK_THROWS_AS(AllReduceTable::from_json(damaged), ddp::ReadError);
}
