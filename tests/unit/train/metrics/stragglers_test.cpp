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

/// Ten steps of kStepMs.
RankNumbers busy(double ms, double loader_wait_ms = 0) {
  return {.seconds = 10 * kStepMs / 1000,
          .steps = 10,
          .exposed_comm_ms = kStepMs - ms,
          .loader_wait_ms = loader_wait_ms};
}

RankNumbers gpu(double busy_ms, double clock_mhz, double clock_limits = 0) {
  auto rank = busy(busy_ms);
  rank.device = {.host = "n2",
                 .name = "cuda:1",
                 .numbers = {.utilisation_percent = 99,
                             .temperature_c = 91,
                             .power_w = 350,
                             .sm_clock_mhz = clock_mhz,
                             .clock_limits = clock_limits}};
  return rank;
}

/// What the lines of `num_lines` logging steps say, ten steps apart.
std::string warnings(Stragglers& stragglers, const std::vector<RankNumbers>& ranks,
                     int num_lines = 3, int64_t first_step = 10) {
  std::string text;
  for (int line = 0; line < num_lines; ++line) {
    text += stragglers.add(first_step + 10 * line, ranks).warning;
  }
  return text;
}

}  // namespace

TEST_CASE("a rank whose loader is slow is named in the third logging step") {
  Stragglers stragglers;
  const std::vector<RankNumbers> ranks = {busy(10), busy(28, 18.5), busy(10), busy(9, 0.5)};
  REQUIRE(warnings(stragglers, ranks, 2) == "");
  REQUIRE(stragglers.ranks()[1].since_step == -1);
  REQUIRE(stragglers.add(30, ranks).warning ==
          "rank 1 slows the job down since step 10: it is busy 28.0 of 30.0 ms a step, the others "
          "10.0; its loader made it wait 18.5 ms a step (others 0.0)");
  REQUIRE(stragglers.ranks()[1].since_step == 10);
  REQUIRE(stragglers.ranks()[0].since_step == -1);
  REQUIRE(warnings(stragglers, ranks, 20, 40) == "");  // once
}

TEST_CASE("a GPU with a lower clock is named at a tenth of the time") {
  const double heat = ddp::detail::nvml::kHardwareHeat;
  Stragglers stragglers;
  const auto text = warnings(stragglers, {gpu(20, 1980), gpu(20, 1960), gpu(24, 1200, heat)});
  REQUIRE(text ==
          "rank 2 (n2, cuda:1) slows the job down since step 10: it is busy 24.0 of 30.0 ms a "
          "step, the others 20.0; its GPU runs at 1200 MHz (others 1970), 91 degrees, 350 W; "
          "limited by its temperature");
  Stragglers like_others;
  REQUIRE(warnings(like_others, {gpu(20, 1980), gpu(20, 1980), gpu(24, 1900, heat)}) == "");
  Stragglers unharmed;  // nobody waits for the slower clock
  REQUIRE(warnings(unharmed, {gpu(20, 1980), gpu(20, 1980), gpu(20, 1200, heat)}) == "");
}

TEST_CASE("a rank without a known cause is named too") {
  Stragglers of_gpus, of_cpus;
  REQUIRE_THAT(warnings(of_gpus, {gpu(10, 1980), gpu(30, 1980)}),
               Contains("rank 1 (n2, cuda:1) slows the job down") &&
                   Contains("GPU or host is slow or shared (utilisation 99 %, others 99 %)"));
  REQUIRE_THAT(warnings(of_cpus, {busy(30), busy(10)}),
               Contains("rank 0 slows the job down") && Contains("processor is slow or shared"));
}

TEST_CASE("a rank ceases to be a straggler") {
  Stragglers stragglers;
  warnings(stragglers, {busy(10), busy(30)});
  REQUIRE(stragglers.add(40, {busy(10), busy(10)}).info == "");
  REQUIRE(stragglers.add(50, {busy(10), busy(30)}).info == "");
  REQUIRE(stragglers.ranks()[1].since_step == 10);
  REQUIRE(stragglers.add(60, {busy(10), busy(10)}).info == "");
  REQUIRE(stragglers.add(70, {busy(10), busy(10)}).info == "");
  REQUIRE(stragglers.add(80, {busy(10), busy(10)}).info ==
          "rank 1 no longer slows the job down (step 80)");
  REQUIRE(stragglers.ranks()[1].since_step == -1);
  REQUIRE_THAT(warnings(stragglers, {busy(10), busy(30)}, 3, 90), Contains("since step 90"));
}

TEST_CASE("what is no straggler") {
  Stragglers stragglers;
  SECTION("one rank") { REQUIRE(warnings(stragglers, {busy(30)}, 9) == ""); }
  SECTION("all alike") { REQUIRE(warnings(stragglers, {busy(30), busy(29), busy(21)}, 9) == ""); }
  SECTION("now and then") {
    for (int64_t line = 1; line < 30; ++line) {
      REQUIRE(stragglers.add(line, {busy(10), busy(line % 3 == 0 ? 10 : 30)}).warning == "");
    }
  }
  SECTION("in turn") {
    for (int64_t line = 1; line < 30; ++line) {
      const bool first = line % 2 == 0;
      REQUIRE(stragglers.add(line, {busy(first ? 30 : 10), busy(first ? 10 : 30)}).warning == "");
    }
  }
  SECTION("waits that are not measured") {
    auto unknown = busy(10);
    unknown.exposed_comm_ms = NAN;
    REQUIRE(warnings(stragglers, {unknown, unknown}, 9) == "");
    REQUIRE(warnings(stragglers, {unknown, busy(30)}, 9) == "");
  }
  SECTION("no step since the last line") {
    REQUIRE(warnings(stragglers, {RankNumbers{}, RankNumbers{}}, 9) == "");
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
