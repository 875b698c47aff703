// SPDX-License-Identifier: Apache-2.0
// How cluster_check judges and reports rows of several ranks, without a cluster.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "clock_offset.hpp"
#include "ddp/core/error.hpp"
#include "pairing.hpp"
#include "report.hpp"
#include "support/catch.hpp"
#include "thresholds.hpp"

using namespace cluster_check;

namespace {

/// A file of thresholds that goes with the test.
class ThresholdFile {
 public:
  explicit ThresholdFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("cluster_check_" + std::to_string(getpid()) + ".yaml")) {
    std::ofstream(path_) << text;
  }
  ~ThresholdFile() { std::filesystem::remove(path_); }
  Thresholds load() const { return Thresholds::load(path_.string(), ""); }

 private:
  std::filesystem::path path_;
};

/// Eight GPUs of two nodes, with one value of `name` each.
Report report_of(const std::string& group, const std::string& name, std::vector<double> values) {
  Report report;
  for (int rank = 0; rank < static_cast<int>(values.size()); ++rank) {
    report.ranks.push_back({.host = rank < 4 ? "alpha" : "beta",
                            .node_rank = rank / 4,
                            .local_rank = rank % 4,
                            .device = "cuda:" + std::to_string(rank % 4),
                            .gpu_name = "NVIDIA H200",
                            .launch = "mpirun",
                            .backend = "nccl"});
    report.rows.push_back({.group = group,
                           .name = name,
                           .value = values[static_cast<std::size_t>(rank)],
                           .unit = "TFLOP/s",
                           .rank = rank});
  }
  return report;
}

const std::vector<double> kOneSlow = {700, 702, 698, 701, 699, 700, 610, 700};

}  // namespace

TEST_CASE("a slow GPU is named with its node and its distance from the median") {
  auto report = report_of("gpu", "gemm_bf16_8192", kOneSlow);
  ThresholdFile("gpu:\n  percent_below_median: 8\n").load().judge(report);
  const auto failures = failures_of(report);
  REQUIRE(failures.size() == 1);
  CHECK(failures[0] ==
        "gpu.gemm_bf16_8192 = 610 TFLOP/s, must be at most 8 % below the median: rank 6 (cuda:2, "
        "NVIDIA H200) on node beta; 12.86 % below the median");
  CHECK(to_table(report).find("worst: rank 6 on beta, 12.86 % below the median") !=
        std::string::npos);
}

TEST_CASE("a value at the threshold passes, one beyond it fails, in both directions") {
  auto speed = report_of("gpu", "device_copy", {3.75, 3.74});
  ThresholdFile("gpu:\n  device_copy: 3.75\n").load().judge(speed);
  CHECK(speed.rows[0].verdict == Verdict::Pass);
  CHECK(speed.rows[1].verdict == Verdict::Fail);
  auto errors = report_of("health", "uncorrected_ecc_errors", {0, 1});
  ThresholdFile("health:\n  uncorrected_ecc_errors: 0\n").load().judge(errors);
  CHECK(errors.rows[0].verdict == Verdict::Pass);
  CHECK(errors.rows[1].verdict == Verdict::Fail);
}

TEST_CASE("a value that nobody can tell does not fail") {
  auto report = report_of("health", "nvlinks_down", {0, 0});
  report.rows[1].value.reset();
  ThresholdFile("health:\n  nvlinks_down: 0\n").load().judge(report);
  CHECK(report.rows[1].verdict == Verdict::NotAvailable);
  CHECK(failures_of(report).empty());
  const auto json = nlohmann::json::parse(to_json(report));
  CHECK(json["rows"][1]["value"].is_null());
  CHECK(json["rows"][1]["verdict"] == "n/a");
  CHECK(json["passed"] == true);
}

TEST_CASE("thresholds made from a run let it pass and refuse a much slower one") {
  auto run = report_of("gpu", "gemm_bf16_8192", kOneSlow);
  run.started = "2026-01-01 00:00:00";
  const auto base = Thresholds::load("h200", "");
  const ThresholdFile file(make_thresholds(run, base));
  file.load().judge(run);
  CHECK(run.rows[0].verdict == Verdict::Pass);
  CHECK(run.rows[6].threshold.find("at least 579") == 0);  // 610 less 5 %, rounded down
  auto slower = report_of("gpu", "gemm_bf16_8192", std::vector<double>(8, 570));
  file.load().judge(slower);
  CHECK(failures_of(slower).size() == 8);
  CHECK(*file.load().find("health", "uncorrected_ecc_errors") == 0);  // fixed: the base's
}

TEST_CASE("every shipped set is valid, and auto chooses by the GPU's name") {
  for (const char* name : {"a100", "h100", "h200", "cpu"}) {
    CHECK(Thresholds::load(name, "").name() == name);
  }
  CHECK(Thresholds::load("auto", "NVIDIA H100 80GB HBM3").name() == "h100");
  CHECK(Thresholds::load("auto", "NVIDIA A100-SXM4-80GB").name() == "a100");
  CHECK(Thresholds::load("auto", "").name() == "cpu");
  CHECK(Thresholds::load("auto", "Another GPU").name() == "none (no set for Another GPU)");
  for (const std::string name :
       {"NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"}) {
    CHECK(Thresholds::load("auto", name).name() == "none (no set for " + name + ")");
  }
}

TEST_CASE("an unknown key of a threshold file is an error that names it") {
  try {
    ThresholdFile("gpu:\n  gemm_bf16_8129: 600\n").load();
    FAIL("no error");
  } catch (const ddp::SettingsError& error) {
    CHECK(std::string(error.what()).find("gpu.gemm_bf16_8129") != std::string::npos);
  }
}

TEST_CASE("thresholds without a value are named and do not count as met") {
  auto report = report_of("gpu", "device_copy", {4, 3.5});
  ThresholdFile("gpu:\n  device_copy: 3\n  host_to_device: 50\nhealth:\n  gpus: 8\n")
      .load()
      .judge(report);
  CHECK(verdict_of(report) ==
        "all checks passed: 1 threshold is met; not measured: gpu.host_to_device, health.gpus");
  auto many = report_of("gpu", "device_copy", {4});
  Thresholds::load("h200", "").judge(many);
  CHECK(verdict_of(many) == ddp::concat("all checks passed: 1 threshold is met; ",
                                        many.not_measured.size(), " others were not measured"));
  auto slow = report_of("gpu", "device_copy", {4, 2});
  ThresholdFile("gpu:\n  device_copy: 3\n").load().judge(slow);
  CHECK(slow.num_met == 0);
  CHECK(verdict_of(slow) == "1 row failed");
  auto unjudged = report_of("gpu", "device_copy", {4});
  Thresholds::load("none", "").judge(unjudged);
  CHECK(verdict_of(unjudged) == "no threshold was checked");
}

TEST_CASE("a threshold is a finite number of at least 0") {
  for (const std::string value : {"-3", ".inf", ".nan", "fast", "auto", "[1]", ""}) {
    INFO(value);
    try {
      ThresholdFile("gpu:\n  device_copy: " + value + "\n").load();
      FAIL("no error");
    } catch (const ddp::SettingsError& error) {
      const std::string text = error.what();
      CHECK(text.find("cluster_check: thresholds=/") == 0);
      CHECK(text.find(".yaml:2: gpu.device_copy: expected a finite number") != std::string::npos);
    }
  }
}

TEST_CASE("the JSON has a line for each check, and the last line of the table") {
  auto report = report_of("gpu", "gemm_bf16_8192", kOneSlow);
  report.rows[6].text = "burst \xff";  // a driver's byte that is no UTF-8
  report.rows.push_back({.group = "gpu", .name = "nvlinks_down", .rank = 0});
  ThresholdFile("gpu:\n  gemm_bf16_8192: 650\n").load().judge(report);
  const auto json = nlohmann::json::parse(to_json(report));
  CHECK(json["summary"] == verdict_of(report));
  REQUIRE(json["checks"].size() == 2);
  const auto& line = json["checks"][0];
  CHECK(line["name"] == "gemm_bf16_8192");
  CHECK(line["lowest"] == 610);
  CHECK(line["median"] == 700);
  CHECK(line["highest"] == 702);
  CHECK(line["threshold"] == "at least 650");
  CHECK(line["verdict"] == "fail");
  CHECK(line["worst"] == "rank 6 on beta, 12.86 % below the median");
  CHECK(line["text"] == "burst \xef\xbf\xbd");
  CHECK(json["checks"][1]["lowest"].is_null());
}

TEST_CASE("in a tournament every pair meets once, and nobody plays twice in a round") {
  for (const int slots : {2, 4, 6, 8, 16}) {
    std::set<std::pair<int, int>> met;
    for (int round = 0; round < slots - 1; ++round) {
      for (int rank = 0; rank < slots; ++rank) {
        const int partner = partner_of(rank, round, slots);
        CHECK(partner != rank);
        CHECK(partner_of(partner, round, slots) == rank);
        met.insert({rank, partner});
      }
    }
    CHECK(met.size() == static_cast<std::size_t>(slots * (slots - 1)));
  }
}

TEST_CASE("one slow link is found in its direction, among the links of its kind") {
  // Ranks 0 and 1 share a node, rank 2 has its own. The link from 2 to 0 is slow.
  const std::vector<std::vector<int64_t>> received = {
      {0, 200'000'000, 10'000'000}, {100'000'000, 0, 40'000'000}, {50'000'000, 60'000'000, 0}};
  const auto pairs = pairs_from(received);
  CHECK(pairs[2][0] == 10);
  CHECK(pairs[0][2] == 50);
  const auto links = links_of(pairs, {0, 0, 1});
  REQUIRE(links.same_node.size() == 2);
  REQUIRE(links.other_node.size() == 4);
  const auto slowest = slowest_of(links.other_node, {"alpha", "alpha", "beta"});
  CHECK(slowest.link.from == 2);
  CHECK(slowest.link.to == 0);
  CHECK(slowest.link.gbps == 10);
  // The median of an even number of links is the mean of the middle two: 45.
  CHECK(std::abs(slowest.percent - 100 * 35.0 / 45) < 1e-9);
  CHECK(slowest.text ==
        "slowest: rank 2 on beta to rank 0 on alpha, 77.8 % below the median of 4 links");
  const auto inside = slowest_of(links.same_node, {"alpha", "alpha", "beta"});
  CHECK(inside.link.from == 0);
  CHECK(inside.link.to == 1);
}

TEST_CASE("barriers bound how far a clock is ahead or behind, however slow the network is") {
  // True times in microseconds: rank 0 enters and leaves, then this rank, for two barriers. The
  // second barrier bounds from above, the first from below.
  const std::vector<int64_t> root = {0, 400, 1000, 1900};
  const std::vector<int64_t> own = {300, 700, 1050, 1120};
  for (const int64_t ahead : {0L, 5000L, -5000L}) {
    auto shifted = own;
    for (auto& time : shifted) {
      time += ahead;
    }
    const auto offset = bound_offset(shifted, root);
    const auto true_ms = static_cast<double>(ahead) / 1000;
    CHECK(std::abs(offset.low - (true_ms - 0.1)) < 1e-9);
    CHECK(std::abs(offset.high - (true_ms + 0.12)) < 1e-9);
    const double least = ahead == 0 ? 0 : ahead > 0 ? 4.9 : 4.88;
    CHECK(std::abs(offset.least() - least) < 1e-9);
  }
}

TEST_CASE("a report of one rank has one column of values") {
  auto report = report_of("gpu", "device_copy", {3.5});
  ThresholdFile("gpu:\n  device_copy: 3.75\n").load().judge(report);
  const auto table = to_table(report);
  CHECK(table.find("value") != std::string::npos);
  CHECK(table.find("median") == std::string::npos);
}
