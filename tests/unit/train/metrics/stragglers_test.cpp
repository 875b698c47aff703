// SPDX-License-Identifier: Apache-2.0
// Ranks for which the others wait.
#include "train/metrics/ranks/stragglers.hpp"

#include <nlohmann/json.hpp>

#include "support/catch.hpp"

namespace {

using Catch::Matchers::Contains;
using ddp::detail::RankNumbers;
using ddp::detail::Stragglers;

constexpr double kStepMs = 30;
constexpr double kHeat = 0x40;  // NVML's bit

/// Ten steps of kStepMs.
RankNumbers busy(double ms, double loader_wait_ms = 0) {
  return {.seconds = 10 * kStepMs / 1000,
          .steps = 10,
          .exposed_comm_ms = kStepMs - ms,
          .loader_wait_ms = loader_wait_ms};
}

RankNumbers gpu(double busy_ms, double clock_mhz, double throttle_reasons = 0) {
  auto rank = busy(busy_ms);
  rank.device = {.host = "n2",
                 .name = "cuda:1",
                 .numbers = {.utilisation_percent = 99,
                             .temperature_c = 91,
                             .power_w = 350,
                             .sm_clock_mhz = clock_mhz,
                             .throttle_reasons = throttle_reasons}};
  return rank;
}

/// What `num_lines` logging steps say, ten steps apart.
std::vector<std::string> warnings(Stragglers& stragglers, const std::vector<RankNumbers>& ranks,
                                  int num_lines = 3, int64_t first_step = 10) {
  std::vector<std::string> all;
  for (int line = 0; line < num_lines; ++line) {
    const auto more = stragglers.add(first_step + 10 * line, ranks).warnings;
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

std::string warning(const std::vector<RankNumbers>& ranks) {
  Stragglers stragglers;
  const auto all = warnings(stragglers, ranks);
  REQUIRE(all.size() == 1);
  return all[0];
}

bool is_quiet(const std::vector<RankNumbers>& ranks) {
  Stragglers stragglers;
  return warnings(stragglers, ranks, 9).empty();
}

}  // namespace

TEST_CASE("a rank whose loader is slow is named in the third logging step") {
  Stragglers stragglers;
  const std::vector<RankNumbers> ranks = {busy(10), busy(28, 18.5), busy(10), busy(9, 0.5)};
  REQUIRE(warnings(stragglers, ranks, 2).empty());
  REQUIRE(stragglers.ranks()[1].since_step == -1);
  REQUIRE(stragglers.add(30, ranks).warnings ==
          std::vector<std::string>{
              "rank 1 has slowed the job down since step 10: it is busy 28.0 of 30.0 ms a step, "
              "the others 10.0; its loader made it wait 18.5 ms a step (others 0.0)"});
  REQUIRE(stragglers.ranks()[1].since_step == 10);
  REQUIRE(stragglers.ranks()[0].since_step == -1);
  REQUIRE(warnings(stragglers, ranks, 20, 40).empty());  // once
}

TEST_CASE("a GPU with a lower clock is named from 1.1 times the others' time on") {
  REQUIRE(warning({gpu(20, 1980), gpu(20, 1960), gpu(24, 1200, kHeat)}) ==
          "rank 2 (n2, cuda:1) has slowed the job down since step 10: it is busy 24.0 of 30.0 ms "
          "a step, the others 20.0; its GPU runs at 1200 MHz (others 1970); 91 degrees; 350 W; "
          "limited by: hardware thermal slowdown");
  REQUIRE(is_quiet({gpu(20, 1980), gpu(20, 1980), gpu(24, 1900, kHeat)}));
  REQUIRE(is_quiet({gpu(20, 1980), gpu(20, 1980), gpu(20, 1200, kHeat)}));  // nobody waits for it
}

TEST_CASE("only known numbers are named") {
  auto bare = gpu(24, 1200);
  bare.device->numbers = {.sm_clock_mhz = 1200};
  REQUIRE_THAT(warning({gpu(20, 1980), gpu(20, 1980), bare}),
               Contains("its GPU runs at 1200 MHz (others 1980)") && !Contains("nan") &&
                   !Contains("degrees") && !Contains("limited"));
  REQUIRE_THAT(warning({gpu(10, 1980), gpu(30, 1980)}),
               Contains("its loader is not the cause; its GPU runs at 1980 MHz like the others'; "
                        "utilisation 99 % (others 99 %)"));
  REQUIRE_THAT(warning({busy(30, NAN), busy(10, NAN)}),
               Contains("rank 0 has slowed") && Contains("or its processor is slow") &&
                   !Contains("loader") && !Contains("nan"));
  REQUIRE_THAT(warning({busy(10, NAN), busy(28, 18.5)}), Contains("18.5 ms a step (others 0.0)"));
}

TEST_CASE("a slow rank of short steps is named once the job lost a noticeable time") {
  const auto brief = [](double busy_ms) {
    return RankNumbers{.seconds = 0.03, .steps = 10, .exposed_comm_ms = 3 - busy_ms};
  };
  Stragglers stragglers;
  const std::vector<RankNumbers> ranks = {brief(1), brief(2.2), brief(1)};
  REQUIRE(warnings(stragglers, ranks, 4).empty());  // 48 ms
  REQUIRE_THAT(warnings(stragglers, ranks, 1, 50).at(0), Contains("since step 10"));
}

TEST_CASE("each of two stragglers has its line") {
  Stragglers stragglers;
  const auto all = warnings(stragglers, {busy(10), busy(30), busy(10), busy(29), busy(10)});
  REQUIRE(all.size() == 2);
  REQUIRE_THAT(all[0], Contains("rank 1 has slowed"));
  REQUIRE_THAT(all[1], Contains("rank 3 has slowed"));
}

TEST_CASE("a rank ceases to be a straggler") {
  Stragglers stragglers;
  warnings(stragglers, {busy(10), busy(30)});
  REQUIRE(stragglers.add(40, {busy(10), busy(10)}).infos.empty());
  REQUIRE(stragglers.add(50, {busy(10), busy(28, 18)}).infos.empty());
  REQUIRE(stragglers.ranks()[1].since_step == 10);
  REQUIRE_THAT(stragglers.ranks()[1].cause, Contains("its loader"));  // the newest
  for (int64_t step : {60, 70}) {
    REQUIRE(stragglers.add(step, {busy(10), busy(10)}).infos.empty());
  }
  auto unknown = busy(10);
  unknown.exposed_comm_ms = NAN;
  REQUIRE(stragglers.add(80, {busy(10), unknown}).infos.empty());  // says nothing
  REQUIRE(stragglers.add(90, {busy(10), busy(10)}).infos ==
          std::vector<std::string>{"rank 1 no longer slows the job down (step 90)"});
  REQUIRE(stragglers.ranks()[1].since_step == -1);
  REQUIRE_THAT(warnings(stragglers, {busy(10), busy(30)}, 3, 100).at(0),
               Contains("since step 100"));
}

TEST_CASE("what is no straggler") {
  Stragglers stragglers;
  SECTION("one rank") {
    REQUIRE(is_quiet({busy(30)}));
  }
  SECTION("all alike") {
    REQUIRE(is_quiet({busy(30), busy(29), busy(21)}));
  }
  SECTION("a difference that the step hardly feels") {
    REQUIRE(is_quiet({busy(3), busy(1.9), busy(1.9)}));
    REQUIRE(is_quiet({busy(2), busy(0), busy(-5)}));
    REQUIRE(is_quiet({gpu(5, 1200), gpu(4, 1980), gpu(4, 1980)}));
  }
  SECTION("now and then") {
    for (int64_t line = 1; line < 30; ++line) {
      REQUIRE(stragglers.add(line, {busy(10), busy(line % 3 == 0 ? 10 : 30)}).warnings.empty());
    }
  }
  SECTION("in turn") {
    for (int64_t line = 1; line < 30; ++line) {
      const bool first = line % 2 == 0;
      REQUIRE(
          stragglers.add(line, {busy(first ? 30 : 10), busy(first ? 10 : 30)}).warnings.empty());
    }
  }
  SECTION("waits that are not measured") {
    auto unknown = busy(10);
    unknown.exposed_comm_ms = NAN;
    REQUIRE(is_quiet({unknown, unknown}));
    REQUIRE(is_quiet({unknown, busy(30)}));
  }
  SECTION("no step since the last line") {
    REQUIRE(is_quiet({RankNumbers{}, RankNumbers{}}));
  }
}

TEST_CASE("ranks.json says since when a rank is slow, and why") {
  Stragglers stragglers;
  const std::vector<RankNumbers> ranks = {busy(10), busy(28, 18.5)};
  warnings(stragglers, ranks);
  const auto json =
      nlohmann::json::parse(ddp::detail::ranks_json({.step = 30}, ranks, stragglers.ranks()));
  REQUIRE(!json.at("ranks").at(0).contains("slow_since_step"));
  REQUIRE(json.at("ranks").at(1).at("slow_since_step") == 10);
  REQUIRE(json.at("ranks").at(1).at("slow_because") ==
          "its loader made it wait 18.5 ms a step (others 0.0)");
}
