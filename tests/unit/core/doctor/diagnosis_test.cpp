// SPDX-License-Identifier: Apache-2.0
// Verdicts of the hang doctor: each kind, and what must not be one.
#include "core/control/doctor/diagnosis.hpp"

#include "core/control/doctor/group_members.hpp"
#include "support/catch.hpp"
#include "unit/core/doctor/evidence.hpp"

namespace ddp::test {
namespace {

using namespace std::chrono_literals;
using detail::CollectiveEntry;
using detail::CollectiveState;
using detail::diagnose;
using detail::PlaneCall;
using detail::RankEvidence;
using detail::Verdict;
using detail::VerdictKind;

void check(const Verdict& verdict, VerdictKind kind, const std::vector<int>& ranks,
           const std::string& text) {
  CHECK(detail::to_string(verdict.kind) == std::string(detail::to_string(kind)));
  CHECK(verdict.ranks == ranks);
  CHECK(verdict.text == text);
}

TEST_CASE("doctor: a rank that did not enter a collective is named with its place") {
  const std::string entered =
      " did not enter all_reduce #12 (sum of 8 Float, 32 bytes; bucket 4: conv2.weight … bn1.bias)";
  check(diagnose({waiting(), absent("training, loader, waiting for batch 406 of epoch 2"),
                  waiting(), waiting()}),
        VerdictKind::Absent, {1},
        "rank 1 (node)" + entered +
            "; it waits at step 5 in the loader for batch 406 of epoch 2; ranks 0, 2-3 wait since "
            "31 s");
  check(diagnose({absent("save"), waiting(), absent("save")}), VerdictKind::Absent, {0, 2},
        "rank 0 (node) (and rank 2)" + entered +
            "; it is at step 5 in save (3 % of a core); rank 1 waits since 31 s");
  check(diagnose({waiting(), absent("forward", 98)}), VerdictKind::Computes, {1},
        "rank 1 (node)" + entered +
            "; it computes at step 5 in forward (98 % of a core); rank 0 waits since 31 s");
}

TEST_CASE("doctor: ranks in the control plane") {
  const PlaneCall gathering{.sequence = 7, .name = "all_gather of 'metrics'"};
  auto verdict = diagnose({waiting(), in_plane_call(absent("metrics"), gathering)});
  CHECK(verdict.kind == VerdictKind::Absent);
  CHECK_FALSE(verdict.is_certain);  // rank 0 goes on beside its collective
  CHECK_THAT(verdict.text,
             Catch::Contains("it waits at step 5 in the control plane's all_gather of 'metrics'"));

  const PlaneCall leaving{.sequence = 7, .name = "barrier of 'close'", .leaves = true};
  verdict = diagnose({waiting(), in_plane_call(absent("close"), leaving)});
  CHECK(verdict.kind == VerdictKind::Left);
  CHECK(verdict.is_certain);
  CHECK_THAT(verdict.text, Catch::Contains("; it left at step 5; rank 0 waits since 31 s"));

  const PlaneCall comparing{.sequence = 7, .name = "all_gather of 'requires_grad of fc.bias'"};
  verdict = diagnose({waiting(), in_plane_call(absent("requires_grad of fc.bias"), comparing)});
  CHECK(verdict.kind == VerdictKind::Frozen);
  CHECK(verdict.ranks == std::vector<int>{1});
  CHECK_THAT(verdict.text, Catch::Contains("it changed requires_grad of fc.bias, which the others "
                                           "did not at step 5"));

  auto gathers = in_plane_call(rank_with({ended(12)}), gathering);
  gathers.waited = 2400ms;
  auto busy = rank_with({ended(12)});
  busy.report->position.where = "evaluation";
  check(diagnose({gathers, busy, gathers}), VerdictKind::Absent, {1},
        "rank 1 (node) did not enter the control plane's all_gather of 'metrics'; it is at step 5 "
        "in evaluation (0 % of a core); ranks 0, 2 wait since 2.4 s");
}

TEST_CASE("doctor: ranks whose calls differ") {
  const auto with = [](const std::string& operation, const std::string& label = kBucket) {
    return rank_with({ended(11), pending(12, operation, label)});
  };
  check(diagnose({waiting(), with("barrier (no tensor)", ""), waiting()}),
        VerdictKind::OtherOperation, {1},
        "rank 0 (node) and rank 1 (node) call different operations: rank 0 all_reduce #12 (sum of "
        "8 Float, 32 bytes; bucket 4: conv2.weight … bn1.bias), rank 1 barrier #12 (no tensor); "
        "ranks 0-2 wait since 31 s");
  auto verdict =
      diagnose({with("all_reduce (sum of 9 Float, 36 bytes)"), waiting(), waiting(), waiting()});
  CHECK(verdict.kind == VerdictKind::OtherSize);
  CHECK(verdict.is_certain);
  CHECK(verdict.ranks == std::vector<int>{0});
  CHECK_THAT(verdict.text, Catch::Contains("call one operation with different sizes, dtypes or "
                                           "roots: rank 0 all_reduce #12 (sum of 9 Float"));
  // The root of a broadcast does not wait for the others.
  verdict = diagnose({rank_with({ended(12, "broadcast (of 8 Float)", "")}), waiting()});
  CHECK(verdict.kind == VerdictKind::OtherOperation);

  const auto in_order = [](const std::string& first, const std::string& second) {
    return rank_with({ended(11), pending(12, kSum, first), pending(13, kSum, second)});
  };
  verdict =
      diagnose({in_order("bucket 0: a", "bucket 1: b"), in_order("bucket 1: b", "bucket 0: a")});
  CHECK(verdict.kind == VerdictKind::OtherOrder);
  CHECK_THAT(verdict.text,
             Catch::Contains("call collectives in different orders: rank 0 all_reduce #12 (sum of "
                             "8 Float, 32 bytes; bucket 0: a), rank 1 all_reduce #12 (sum of 8 "
                             "Float, 32 bytes; bucket 1: b)"));
  // Sizes differ because the order does.
  verdict = diagnose({rank_with({pending(12, "all_reduce (1 Float)", "a"),
                                 pending(13, "all_reduce (2 Float)", "b")}),
                      rank_with({pending(12, "all_reduce (2 Float)", "b"),
                                 pending(13, "all_reduce (1 Float)", "a")})});
  CHECK(verdict.kind == VerdictKind::OtherOrder);
}

TEST_CASE("doctor: replays of CUDA graphs") {
  check(diagnose({replaying(0, 57, 1), replaying(0, 56, 3)}), VerdictKind::Absent, {1},
        "rank 1 (node) did not enter all_reduce #2 (sum of 8 Float, 32 bytes; bucket 4: "
        "conv2.weight … bn1.bias) of CUDA graph 0, replay 57; it is at step 5 (0 % of a core); "
        "rank 0 waits since 31 s");
  auto verdict = diagnose({replaying(0, 57, 1), replaying(1, 2, 0, "all_gather (8 Float)")});
  CHECK(verdict.kind == VerdictKind::OtherGraph);
  CHECK_THAT(verdict.text, Catch::Contains("of CUDA graph 0, replay 57, rank 1 in all_gather #1"));
  verdict = diagnose({replaying(0, 57, 1), replaying(0, 57, 3)});
  CHECK(verdict.kind == VerdictKind::DeadLink);
  CHECK(verdict.ranks == std::vector<int>{0});
  verdict = diagnose({replaying(0, 57, 1), replaying(0, 57, 1)});
  CHECK(verdict.kind == VerdictKind::NothingCertain);
  CHECK_THAT(verdict.text, Catch::StartsWith("all ranks entered all_reduce #2"));
}

TEST_CASE("doctor: each rank decides by itself which steps it replays") {
  const auto eager = [](const std::string& operation) {
    auto rank = replaying(0, 56, 3);
    rank.report->histories[0].collectives = {pending(100, operation)};
    return rank;
  };
  // The same step, eager on one rank and in another graph on the next.
  const std::vector<RankEvidence> same = {replaying(0, 57, 1), eager(kSum), replaying(1, 2, 0)};
  auto verdict = diagnose(same);
  CHECK(verdict.kind == VerdictKind::NothingCertain);
  CHECK_THAT(verdict.text, Catch::EndsWith("; ranks 0-2 wait since 31 s"));
  // Numbers of ranks with other counts are those of other calls: 100 has not ended on rank 1.
  auto more = eager(kSum);
  more.report->histories[0].collectives = {ended(100), pending(103)};
  more.report->histories[0].num_replayed += 3;
  CHECK(diagnose({eager(kSum), more}).kind == VerdictKind::NothingCertain);
  // Whether a rank without a wait has made the step is not known.
  verdict = diagnose({replaying(0, 57, 1), eager(kSum), replaying(1, 1, 3)});
  check(verdict, VerdictKind::NothingCertain, {},
        "ranks that replay different steps cannot be compared: rank 2 (node) may have entered "
        "all_reduce #2 (sum of 8 Float, 32 bytes; bucket 4: conv2.weight … bn1.bias) of CUDA graph "
        "0, replay 57 or not; it is at step 5 (0 % of a core); ranks 0-1 wait since 31 s");
  // Rank 1 made a step more in eager mode, or in another graph, and one less in the graph.
  auto eager_more = replaying(0, 56, 3);
  eager_more.report->histories[0].collectives = {ended(3)};
  CHECK(diagnose({replaying(0, 57, 1), eager_more}).kind == VerdictKind::NothingCertain);
  auto other_more = replaying(0, 56, 3);
  other_more.report->histories[0].num_replayed += 3;
  CHECK(diagnose({replaying(0, 57, 1), other_more}).kind == VerdictKind::NothingCertain);
  // Its last eager call fits, but may be one of an earlier step.
  auto waits = replaying(0, 56, 3);
  waits.report->histories[0].collectives = {ended(99, kSum, "a"), pending(100)};
  auto fits = replaying(0, 56, 3);
  fits.report->histories[0].collectives = {ended(98), ended(99)};
  CHECK(diagnose({waits, fits}).ranks == std::vector<int>{1});
  fits.report->histories[0].num_replayed += 3;
  CHECK(diagnose({waits, fits}).kind == VerdictKind::NothingCertain);
  CHECK(diagnose({replaying(0, 57, 1), eager("barrier (no tensor)")}).kind ==
        VerdictKind::OtherGraph);
  // Eager calls of one number are different calls.
  auto other = eager("barrier (no tensor)");
  other.report->histories[0].collectives.insert(other.report->histories[0].collectives.begin(),
                                                ended(99, kSum));
  CHECK(diagnose({eager(kSum), other}).kind == VerdictKind::OtherGraph);
  // Rank 0 has ended the replay in which rank 1 waits.
  auto ahead = replaying(0, 57, 3);
  ahead.report->histories[0].collectives = {pending(100, "barrier (no tensor)", "")};
  CHECK(diagnose({ahead, replaying(0, 57, 1)}).kind != VerdictKind::OtherGraph);
  CHECK(diagnose({eager(kSum), replaying(0, 56, 3)}).ranks == std::vector<int>{1});
}

TEST_CASE("doctor: processes that do not run, and links that are down") {
  auto stopped = silent("node");
  stopped.process_state = 'T';
  check(
      diagnose({waiting(), stopped}), VerdictKind::Stopped, {1},
      "rank 1 (node) is stopped by SIGSTOP (`kill -CONT 4711` resumes it), last seen 8.1 s ago "
      "at step 5 in forward; rank 0 waits since 31 s in all_reduce #12 (sum of 8 Float, 32 bytes; "
      "bucket 4: conv2.weight … bn1.bias)");
  stopped.is_connected = false;  // its connection was given up
  CHECK(diagnose({waiting(), stopped}).kind == VerdictKind::Stopped);
  stopped.process_state = 't';
  CHECK_THAT(diagnose({waiting(), stopped}).text, Catch::Contains("is stopped by a debugger"));

  auto on_node2 = waiting();
  on_node2.host = "node2";
  auto verdict = diagnose({waiting(), on_node2, silent("node2")});
  CHECK(verdict.kind == VerdictKind::Stopped);
  CHECK_THAT(verdict.text, Catch::Contains("rank 2 (node2) does not answer, while other ranks of "
                                           "node2 do: process 4711 is stopped"));
  verdict = diagnose({waiting(), silent("node2"), silent("node2")});
  CHECK(verdict.kind == VerdictKind::DeadLink);
  CHECK(verdict.ranks == std::vector<int>{1, 2});
  CHECK_THAT(verdict.text,
             Catch::StartsWith("rank 0 (node) hears nothing from node2 (ranks 1-2): "));

  auto lost = silent("node2");
  lost.is_connected = false;
  verdict = diagnose({waiting(), lost});
  CHECK(verdict.kind == VerdictKind::Lost);
  CHECK_FALSE(verdict.is_certain);

  verdict = diagnose({rank_with({ended(12)}), waiting(), rank_with({ended(12)})});
  CHECK(verdict.kind == VerdictKind::DeadLink);
  CHECK(verdict.ranks == std::vector<int>{1});
  CHECK_THAT(verdict.text, Catch::Contains("ranks 0, 2 ended all_reduce #12") &&
                               Catch::Contains(", and rank 1 (node) did not"));
}

TEST_CASE("doctor: data on their way are no dead link") {
  auto short_wait = pending(12);
  short_wait.enqueued_ms = 900;
  const auto waits_briefly = rank_with({ended(11), short_wait});
  check(diagnose({rank_with({ended(12)}), waits_briefly}), VerdictKind::NothingCertain, {},
        "rank 0 ended all_reduce #12 (sum of 8 Float, 32 bytes; bucket 4: conv2.weight … "
        "bn1.bias), and rank 1 (node) not yet; rank 1 waits since 0.9 s");
}

TEST_CASE("doctor: an earlier call for another purpose is named") {
  const auto of = [](uint64_t number, const std::string& label) {
    return call(number, CollectiveState::Ended, kSum, label);
  };
  const auto usual = rank_with({of(10, "a"), of(11, "b"), of(12, "a"), pending(13, kSum, "b")});
  const auto shifted = rank_with({of(10, "a"), of(11, ""), of(12, "b")});
  check(diagnose({usual, shifted, usual}), VerdictKind::OtherOperation, {1},
        "rank 0 (node) and rank 1 (node) call one operation for different purposes: rank 0 "
        "all_reduce #11 (sum of 8 Float, 32 bytes; b), rank 1 all_reduce #11 (sum of 8 Float, 32 "
        "bytes); ranks 0, 2 wait since 31 s in all_reduce #13 (sum of 8 Float, 32 bytes; b)");
}

TEST_CASE("doctor: what must not be a verdict") {
  // All ranks are in one collective.
  auto verdict = diagnose({waiting(), waiting()});
  CHECK(verdict.kind == VerdictKind::NothingCertain);
  CHECK(verdict.ranks.empty());
  // No rank waits.
  verdict = diagnose({absent("forward", 90), absent("forward", 95)});
  check(verdict, VerdictKind::NothingCertain, {},
        "no rank waits for another one; rank 0 (node) is at step 5 in forward");
  // A running job waits for a moment.
  auto short_wait = pending(12);
  short_wait.enqueued_ms = 900;
  const auto waits_briefly = rank_with({ended(11), short_wait});
  CHECK(diagnose({waits_briefly, absent("forward", 90)}, {.min_wait = 1s}).kind ==
        VerdictKind::NothingCertain);
  CHECK(diagnose({waits_briefly, absent("forward", 90)}).kind == VerdictKind::Computes);
  // A collective that a rank calls while it computes is no reason to end the job.
  CHECK_FALSE(diagnose({waiting(), absent("forward", 90)}).is_certain);
}

TEST_CASE("doctor: one mark of NCCL covers several collectives") {
  const auto called = [](uint64_t number, const std::string& label) {
    return call(number, CollectiveState::Called, kSum, label);
  };
  // Rank 0's mark covers 12 to 15, rank 2's 12 and 13.
  const auto first = rank_with(
      {ended(11), called(12, "a"), called(13, "b"), called(14, "c"), pending(15, kSum, "d")});
  const auto second = rank_with({ended(11), called(12, "a"), pending(13, kSum, "b"),
                                 pending(14, kSum, "c"), pending(15, kSum, "d")});
  auto verdict = diagnose({first, absent("save"), second});
  check(verdict, VerdictKind::Absent, {1},
        "rank 1 (node) did not enter all_reduce #12 (sum of 8 Float, 32 bytes; a); it is at step 5 "
        "in save (3 % of a core); ranks 0, 2 wait since 31 s");
  // All have called them: what nobody knows is neither pending nor ended.
  verdict = diagnose({first, second, first});
  CHECK(verdict.kind == VerdictKind::NothingCertain);
  CHECK_THAT(verdict.text, Catch::StartsWith("all ranks entered all_reduce #13 (sum of 8 Float, 32 "
                                             "bytes; b)") &&
                               Catch::Contains("; ranks 0-2 wait since 31 s"));
  // The calls before the mark's last are compared, too.
  const auto differs = rank_with({ended(11), called(12, "a"),
                                  call(13, CollectiveState::Called, "barrier (no tensor)", ""),
                                  called(14, "c"), pending(15, kSum, "d")});
  verdict = diagnose({first, differs, first});
  CHECK(verdict.kind == VerdictKind::OtherOperation);
  CHECK(verdict.ranks == std::vector<int>{1});
  CHECK_THAT(verdict.text, Catch::Contains("rank 1 barrier #13"));
}

TEST_CASE("doctor: a number that is not in the history has not ended") {
  // Rank 1 ended 12 and waits in 16, which fits it.
  auto beyond = rank_with({ended(12), ended(15), pending(16)});
  CHECK(diagnose({waiting(), beyond}).kind == VerdictKind::DeadLink);
  CHECK(diagnose({waiting(), beyond}).ranks == std::vector<int>{0});
  // The report left 12 out between others.
  beyond = rank_with({ended(11), pending(16)});
  CHECK(diagnose({waiting(), beyond}).kind == VerdictKind::NothingCertain);
  beyond = rank_with({ended(14), ended(15)});  // 12 is older
  CHECK(diagnose({waiting(), beyond}).kind == VerdictKind::DeadLink);
}

TEST_CASE("doctor: a rank that answers late is not called stopped") {
  auto late = silent("node2");
  late.silence = 800ms;
  auto verdict = diagnose({waiting(), late, absent("save")}, {.min_silence = 2s});
  CHECK(verdict.kind == VerdictKind::Absent);
  CHECK(verdict.ranks == std::vector<int>{2});
  CHECK_THAT(verdict.text, Catch::EndsWith("; rank 0 waits since 31 s; rank 1 did not answer in "
                                           "time"));
  verdict = diagnose({waiting(), late}, {.min_silence = 2s});
  CHECK(verdict.kind == VerdictKind::NothingCertain);
  CHECK_THAT(verdict.text, Catch::StartsWith("all ranks that answered entered all_reduce #12"));
  verdict = diagnose({absent("save"), late}, {.min_silence = 2s});
  CHECK(verdict.kind == VerdictKind::NothingCertain);
  late.silence = 2100ms;
  CHECK(diagnose({waiting(), late}, {.min_silence = 2s}).kind == VerdictKind::DeadLink);
}

TEST_CASE("doctor: only the deadlock of the verdict makes it certain") {
  const PlaneCall leaving{.sequence = 7, .name = "barrier of 'close'", .leaves = true};
  const auto left = in_plane_call(absent("close"), leaving);
  CHECK(diagnose({waiting(), left}).is_certain);
  CHECK_FALSE(diagnose({waiting(), left, silent("node2")}).is_certain);  // that link is the verdict
  // The deadlock is in another communicator than the verdict.
  auto two = [](RankEvidence rank, uint64_t number, bool waits) {
    auto& group = rank.report->position.groups.emplace_back();
    group.id = "zzz";
    group.num_called = number;
    group.pending = waits ? number : 0;
    group.operation = waits ? kSum : "";
    rank.report->histories.push_back({{waits ? pending(number) : ended(number)}, {}});
    return rank;
  };
  const auto verdict =
      diagnose({two(waiting(), 3, false), two(absent("save"), 4, true), two(left, 3, false)});
  CHECK(verdict.group == "world");
  CHECK(verdict.ranks == std::vector<int>{1, 2});
  CHECK(verdict.is_certain);  // rank 2 left
  const auto other =
      diagnose({two(waiting(), 4, false), two(absent("save"), 4, true), two(waiting(), 4, false),
                two(in_plane_call(waiting(), leaving), 3, false)});
  CHECK(other.group == "world");
  CHECK(other.ranks == std::vector<int>{1});
  CHECK_FALSE(other.is_certain);
  const auto second = diagnose(
      {two(rank_with({ended(12)}), 4, true), two(left, 3, false), two(waiting(), 4, false)});
  // Rank 2 left after more collectives than rank 1, which the others wait for first.
  const auto later =
      diagnose({waiting(), absent("save"), in_plane_call(rank_with({ended(15)}), leaving),
                rank_with({pending(20)})});
  CHECK(later.group == "world");
  CHECK(later.ranks == std::vector<int>{1});
  CHECK_FALSE(later.is_certain);
  CHECK(second.group == "world");
  CHECK(second.ranks == std::vector<int>{1});
  CHECK_FALSE(second.is_certain);
}

TEST_CASE("doctor: short waits in the control plane are none") {
  const PlaneCall gathering{.sequence = 7, .name = "all_gather of 'metrics'"};
  const auto in_call = [&](std::chrono::milliseconds waited) {
    auto rank = in_plane_call(rank_with({ended(12)}), gathering);
    rank.waited = waited;
    return rank;
  };
  const auto busy = rank_with({ended(12)});
  CHECK(diagnose({in_call(20ms), busy}, {.min_wait = 1s}).kind == VerdictKind::NothingCertain);
  CHECK(diagnose({in_call(1200ms), busy}, {.min_wait = 1s}).ranks == std::vector<int>{1});
  // Rank 1 has entered it just now, and rank 2 has left it.
  auto beyond = busy;
  beyond.num_calls = 8;
  check(diagnose({in_call(1200ms), in_call(20ms), beyond}, {.min_wait = 1s}),
        VerdictKind::NothingCertain, {},
        "rank 0 waits since 1.2 s in the control plane's all_gather of 'metrics', which all ranks "
        "that answered have entered");
}

TEST_CASE("doctor: an extra call on one rank is no other size") {
  const auto size_9 = "all_reduce (sum of 9 Float, 36 bytes)";
  auto verdict = diagnose({waiting(), rank_with({ended(11), pending(12, size_9, "loss")})});
  CHECK(verdict.kind == VerdictKind::OtherOperation);
  CHECK_THAT(verdict.text, Catch::Contains("call one operation for different purposes: rank 0 ") &&
                               Catch::Contains("; bucket 4: conv2.weight … bn1.bias), rank 1 ") &&
                               Catch::Contains("36 bytes; loss); "));
  // Calls that fit in another step are no other order.
  verdict = diagnose({rank_with({ended(11), pending(12, kSum, "a"), pending(112, size_9, "loss")}),
                      rank_with({pending(12, size_9, "loss"), pending(111, kSum, "a")})});
  CHECK(verdict.kind == VerdictKind::OtherOperation);
}

TEST_CASE("doctor: words for ranks") {
  CHECK(detail::rank_words({3}) == "rank 3");
  CHECK(detail::rank_words({0, 1, 2, 5, 7, 8}) == "ranks 0-2, 5, 7-8");
  std::vector<int> even;
  for (int rank = 0; rank < 200; rank += 2) {
    even.push_back(rank);
  }
  CHECK_THAT(detail::rank_words(even), Catch::Contains("30, … (100 in all)"));
}

}  // namespace
}  // namespace ddp::test
