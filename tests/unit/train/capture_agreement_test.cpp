// SPDX-License-Identifier: Apache-2.0
// Reports that ranks exchange before a capture, and errors if these do not match.
#include "train/graph/capture_agreement.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "unit/core/plane_ranks.hpp"

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

TEST_CASE("a report of a capture is encoded and decoded") {
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

TEST_CASE("captures of the same collectives are replayed, others are refused") {
  auto other = report();
  other.shapes = "[5, 3] [5]";  // uneven shares
  REQUIRE(compare({report(), other}).empty());
  REQUIRE(compare({report()}).empty());

  other.operations[1] = "all_reduce of 16 Float";
  REQUIRE(
      compare({report(), report(), other}, 1) ==
      "the ranks captured different steps: collective 2 of 2 is all_reduce of 16 Float on rank 2 "
      "and all_reduce of 8 Float on rank 0; run the same step on all ranks");
  other.operations.push_back("broadcast of 8 Float");
  REQUIRE_THAT(compare({report(), other}),
               Catch::Contains("rank 1 calls 3 collectives, rank 0 calls 2"));

  other = report();
  other.reason = "aten::item: it waits";
  other.operations.clear();
  REQUIRE(compare({report(), other}) == "on rank 1: aten::item: it waits");
  REQUIRE(compare({other}) == "aten::item: it waits");
}

TEST_CASE("ranks that capture different calls, or are in another collective, get an error") {
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

TEST_CASE("a rank that ran a call without a capture notices another that waits for it") {
  const std::vector<std::string> announcements{"", encode(report())};
  const auto look = [&](int64_t calls_done, int64_t last_captured, int64_t step_id = 2,
                        size_t own = 0) {
    return require_no_missed_capture(announcements, own, step_id, calls_done, last_captured, kName,
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

namespace {

constexpr int64_t kStepId = 3;

/// What each of two ranks' agreements returned, and the error with which it ended.
struct Agreed {
  std::vector<std::string> reasons = std::vector<std::string>(2);
  std::vector<test::RankEnd> ends;
};

/// Both ranks capture call 7; rank 1 with `change` of its report.
Agreed capture_on_two_ranks(const std::function<void(CaptureReport&)>& change,
                            uint64_t call_of_rank_1 = 7) {
  Agreed agreed;
  agreed.ends = test::run_ranks(2, [&](ControlPlane& plane) {
    const auto rank = static_cast<size_t>(plane.rank());
    CaptureAgreement agreement(plane, kStepId, kName);
    auto one = agreement.begin_capture(rank == 0 ? 7 : call_of_rank_1, /*variant=*/1, "[8, 3]");
    one.operations = report().operations;
    if (rank == 1) {
      change(one);
    }
    agreed.reasons[rank] = agreement.agree(one);
    agreement.end_capture(7);
    agreement.end_call(7);
    agreement.check();  // the other rank announced a call that this rank captured, too
  });
  return agreed;
}

}  // namespace

TEST_CASE("ranks that capture the same call agree, or all get one rank's reason") {
  const auto nothing = [](CaptureReport&) {};
  auto agreed = capture_on_two_ranks(nothing);
  REQUIRE(agreed.ends[0].error == "");
  REQUIRE(agreed.ends[1].error == "");
  REQUIRE(agreed.reasons == std::vector<std::string>{"", ""});

  agreed = capture_on_two_ranks([](CaptureReport& one) { one.reason = "only here"; });
  REQUIRE(agreed.reasons == std::vector<std::string>(2, "on rank 1: only here"));

  agreed = capture_on_two_ranks([](CaptureReport& one) { one.operations.pop_back(); });
  REQUIRE(agreed.reasons[0] == agreed.reasons[1]);
  REQUIRE_THAT(agreed.reasons[0], Catch::Contains("rank 1 calls 1 collectives, rank 0 calls 2"));

  agreed = capture_on_two_ranks(nothing, /*call_of_rank_1=*/8);
  REQUIRE_THAT(agreed.ends[0].error,
               Catch::Contains("captures its call 7") && Catch::Contains("rank 1 call 8"));
  REQUIRE_THAT(agreed.ends[1].error,
               Catch::Contains("captures its call 8") && Catch::Contains("rank 0 call 7"));
}

TEST_CASE("a rank that captures alone and the rank that it waits for both get an error") {
  std::string alone;
  test::RankEnd early, missed, ended;
  const auto ends = test::run_ranks(2, [&](ControlPlane& plane) {
    CaptureAgreement agreement(plane, kStepId, kName);
    agreement.set_last_shapes("[4]");
    if (plane.rank() == 0) {
      alone = test::end_of([&] { agreement.agree(agreement.begin_capture(10, 0, "[5]")); }).error;
      return;
    }
    agreement.end_call(9);
    // Rank 0 cannot reach another collective. Its announcement alone arrives here.
    const auto deadline = test::Clock::now() + std::chrono::seconds(10);
    const auto& board = dynamic_cast<AnnouncementBoard&>(plane);
    while (board.announcements_version() == 0 && test::Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    early = test::end_of([&] { agreement.check(); });
    agreement.end_call(10);
    missed = test::end_of([&] { agreement.check(); });
    plane.all_gather("went another way");  // ends rank 0's wait
    agreement.end();
    ended = test::end_of([&] { agreement.check(); });
  });
  REQUIRE(ends[0].error == "");
  REQUIRE(ends[1].error == "");
  CHECK_THAT(alone, Catch::Contains("captures its call 10, and rank 1 does not"));
  CHECK(early.error == "");  // call 10 may still be captured there
  CHECK_THAT(missed.error, Catch::Contains("rank 0 captures its call 10 (batch [5], variant 0)") &&
                               Catch::Contains("whose last batch was [4]"));
  CHECK(missed.exit_code == static_cast<int>(ExitCode::Settings));
  CHECK(ended.error == "");
}

TEST_CASE("ranks need not agree about a step without collectives") {
  std::vector<std::string> reasons;
  test::RankEnd checked;
  const auto ends = test::run_ranks(2, [&](ControlPlane& plane) {
    CaptureAgreement agreement(plane, /*step_id=*/0, kName);
    if (plane.rank() == 0) {
      auto one = agreement.begin_capture(1, 0, "[5]");
      reasons.push_back(agreement.agree(one));
      one.operations = report().operations;
      reasons.push_back(agreement.agree(one));
      one.reason = "only here";
      reasons.push_back(agreement.agree(one));
    }
    plane.barrier();
    if (plane.rank() == 1) {
      agreement.end_call(5);
      checked = test::end_of([&] { agreement.check(); });
    }
  });
  REQUIRE(ends[0].error == "");
  REQUIRE(ends[1].error == "");
  CHECK(checked.error == "");
  REQUIRE(reasons.size() == 3);
  CHECK(reasons[0] == "");
  CHECK_THAT(reasons[1], Catch::Contains("GraphedStepOptions::collective"));
  CHECK(reasons[2] == "only here");
}

TEST_CASE("a check reports that the job failed") {
  test::RankEnd before, after;
  test::run_ranks(2, [&](ControlPlane& plane) {
    CaptureAgreement agreement(plane, kStepId, kName);
    if (plane.rank() == 0) {
      before = test::end_of([&] { agreement.check(); });
    }
    plane.barrier();
    if (plane.rank() == 0) {
      FailureCause cause;
      cause.rank = 0;
      cause.message = "out of memory";
      plane.publish_failure(cause);
      after = test::end_of([&] { agreement.check(); });
    }
  });
  CHECK(before.error == "");
  CHECK_THAT(after.error, Catch::Contains("out of memory"));
  CHECK(after.exit_code == static_cast<int>(ExitCode::PeerLost));
}
