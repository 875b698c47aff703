// SPDX-License-Identifier: Apache-2.0
// Reports that ranks exchange before a capture, and errors if these do not match.
#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "train/capture_agreement.hpp"

namespace {

using namespace ddp;
using namespace ddp::detail;

const std::string kName = "the training step";

CaptureReport report() {
  return {.step_id = 2,
          .call = 7,
          .variant = 1,
          .shapes = "[8, 3] [8]",
          .reason = "",
          .operations = {"all_reduce of 16 Float", "all_reduce of 8 Float"}};
}

std::string compare(const std::vector<CaptureReport>& reports, size_t own = 0) {
  std::vector<std::string> texts;
  for (const auto& one : reports) {
    texts.push_back(encode(one));
  }
  return compare_captures(texts, own, kName);
}

}  // namespace

TEST_CASE("a report of a capture survives the way") {
  auto given = report();
  given.reason = "first\nsecond";
  CaptureReport read;
  REQUIRE(decode(encode(given), read));
  REQUIRE(read.step_id == 2);
  REQUIRE(read.call == 7);
  REQUIRE(read.variant == 1);
  REQUIRE(read.shapes == given.shapes);
  REQUIRE(read.reason == "first second");
  REQUIRE(read.operations == given.operations);
  given = {};
  REQUIRE(decode(encode(given), read));
  REQUIRE(read.operations.empty());
  for (const std::string foreign : {"", "1", "0", "captured step", "captured step\n1 x 2\n\n\n"}) {
    REQUIRE_FALSE(decode(foreign, read));
  }
}

TEST_CASE("captures of the same collectives are replayed, others are told apart") {
  auto other = report();
  other.shapes = "[5, 3] [5]";  // uneven shares
  REQUIRE(compare({report(), other}).empty());
  REQUIRE(compare({report()}).empty());

  other.operations[1] = "all_reduce of 16 Float";
  REQUIRE(
      compare({report(), report(), other}, 1) ==
      "the ranks captured different steps: collective 2 of 2 is all_reduce of 16 Float on rank 2 "
      "and all_reduce of 8 Float on rank 0; every rank has to run the same step");
  other.operations.push_back("broadcast of 8 Float");
  REQUIRE_THAT(compare({report(), other}),
               Catch::Contains("rank 1 calls 3 collectives in it, rank 0 2"));

  other = report();
  other.reason = "aten::item: it waits";
  other.operations.clear();
  REQUIRE(compare({report(), other}) == "on rank 1: aten::item: it waits");
  REQUIRE(compare({other}) == "aten::item: it waits");
}

TEST_CASE("ranks that capture different calls, or something else, do not go on") {
  auto later = report();
  later.call = 8;
  later.shapes = "[5, 3] [5]";
  REQUIRE_THROWS_WITH(
      compare({report(), later}),
      Catch::Contains("captures its call 7 (batch [8, 3] [8], variant 1), rank 1 call 8") &&
          Catch::Contains("StepNumbers::variant"));
  auto variant = report();
  variant.variant = 0;
  REQUIRE_THROWS_AS(compare({report(), variant}, 1), SettingsError);
  auto step = report();
  step.step_id = 3;
  REQUIRE_THROWS_WITH(compare({report(), step}), Catch::Contains("of another GraphedStep"));
  // The other rank polled for a stop.
  REQUIRE_THROWS_WITH(compare_captures({encode(report()), "0"}, 0, kName),
                      Catch::Contains("captures its call 7, and rank 1 does not"));
}

TEST_CASE("a rank that waits to capture a call which went by elsewhere is noticed there") {
  const std::vector<std::string> notes{"", encode(report())};
  const auto look = [&](int64_t calls_done, int64_t last_captured, int64_t step_id = 2,
                        size_t own = 0) {
    return require_no_missed_capture(notes, own, step_id, calls_done, last_captured, kName,
                                     "[4, 3]");
  };
  REQUIRE(look(6, 4));        // call 7 is still pending
  REQUIRE_FALSE(look(9, 7));  // captured on this rank, too
  REQUIRE_FALSE(look(9, 8));
  REQUIRE_FALSE(look(9, 4, 1));     // of another step
  REQUIRE_FALSE(look(9, 4, 2, 1));  // this rank's own
  REQUIRE_THROWS_WITH(look(7, 4), Catch::Contains("rank 1 captures its call 7 (batch [8, 3] [8]") &&
                                      Catch::Contains("rank 0, whose last batch was [4, 3]") &&
                                      Catch::Contains("StepNumbers::variant"));
}
