// SPDX-License-Identifier: Apache-2.0
// Which files rank 0 writes, and the constants of an epoch's row.
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files/file_ops.hpp"
#include "support/catch.hpp"
#include "train/metrics/files/metrics_files.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using ddp::detail::JobNumbers;
using ddp::detail::MetricsFiles;
using testing::read_file;
using testing::TemporaryFolder;

ddp::MetricsOptions written_to(const TemporaryFolder& folder) {
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run = {.precision = "bf16", .batch_size_per_rank = 8, .sample_unit = "tokens"};
  return options;
}

ddp::LaunchEnvironment job_77() {
  ddp::LaunchEnvironment launch;
  launch.job_id = "77";
  launch.num_nodes = 3;
  return launch;
}

const JobNumbers kTwoRanks({{.samples = 10, .seconds = 2, .energy_j = 1}, {.samples = 30}});

// The second line of a CSV file, by the first line's names.
std::map<std::string, std::string> first_row(const std::string& path) {
  std::istringstream in(read_file(path));
  std::string header, line;
  std::getline(in, header);
  std::getline(in, line);
  std::istringstream names(header), cells(line);
  std::map<std::string, std::string> row;
  for (std::string name, cell; std::getline(names, name, ',');) {
    std::getline(cells, cell, ',');
    row[name] = cell;
  }
  return row;
}

}  // namespace

TEST_CASE("an epoch's row has the constants of the run and the numbers of the job") {
  TemporaryFolder folder;
  MetricsFiles files(written_to(folder), job_77(), /*is_main=*/true);
  REQUIRE(files.path() == folder.file("77"));  // the job names the folder
  const bool uses_gpus = GENERATE(true, false);
  files.add_epoch({.epoch = 4,
                   .gpu_type = uses_gpus ? "H100" : "cpu",
                   .uses_gpus = uses_gpus,
                   .test_loss = 0.5},
                  kTwoRanks);
  auto row = first_row(folder.file("77/epochs.csv"));
  REQUIRE(row["epoch"] == "4");
  REQUIRE(row["job_id"] == "77");
  REQUIRE(row["nodes"] == "3");
  REQUIRE(row["gpu_type"] == (uses_gpus ? "H100" : "cpu"));
  REQUIRE(row["gpus"] == (uses_gpus ? "2" : "0"));
  REQUIRE(row["ranks"] == "2");
  REQUIRE(row["precision"] == "bf16");
  REQUIRE(row["global_batch_size"] == "16");
  REQUIRE(row["test_loss"] == "0.5");
  REQUIRE(row["test_accuracy"].empty());
  REQUIRE(row["tokens_per_second"] == "20");
}

TEST_CASE("run.json has the constants of the run and the versions, without unknown ones") {
  TemporaryFolder folder;
  MetricsFiles files(written_to(folder), job_77(), /*is_main=*/true);
  const auto read = [&] { return nlohmann::json::parse(read_file(folder.file("77/run.json"))); };
  files.write_run(
      {.ranks = 2, .gpu_type = "H100", .uses_gpus = true},
      {.host = "node1",
       .device = "cuda",
       .versions = "libddp    0.1.0 (commit abc)\nCUDA      none (built without it)\n"});
  const auto first = read();
  CHECK(first.at("job_id") == "77");
  CHECK(first.at("nodes") == 3);
  CHECK(first.at("gpus") == 2);
  CHECK(first.at("precision") == "bf16");
  CHECK(first.at("global_batch_size") == 16);
  CHECK(first.at("sample_unit") == "tokens");
  CHECK(first.at("host") == "node1");
  std::string why;
  const auto cpu =
      ddp::detail::cpu_name(ddp::detail::read_start("/proc/cpuinfo", 1u << 16, why).value_or(""));
  CHECK(first.value("cpu", "") == cpu);
  CHECK(first.contains("driver") == std::filesystem::exists("/sys/module/nvidia/version"));
  CHECK(first.at("libddp") == "0.1.0 (commit abc)");
  for (const char* unknown :
       {"CUDA", "num_steps", "flops_per_sample", "program_version", "bucket_cap_mb"}) {
    INFO(unknown);
    CHECK(!first.contains(unknown));
  }
  files.write_run({.ranks = 2}, {.num_steps = 40, .flops_per_sample = 1.5, .peak_tflops = 2});
  const auto second = read();
  CHECK(second.at("num_steps") == 40);
  CHECK(second.at("flops_per_sample") == 1.5);
  CHECK(second.at("peak_tflops") == 2);
  CHECK(second.at("started") == first.at("started"));
}

TEST_CASE("the name of the CPU is that of the first core") {
  CHECK(ddp::detail::cpu_name(
            "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\nstepping\t: 1\n\n"
            "processor\t: 1\nmodel name\t: other\n") == "AMD EPYC 9654");
  CHECK(ddp::detail::cpu_name("processor\t: 0\nBogoMIPS\t: 100.00\n").empty());  // Arm
  CHECK(ddp::detail::cpu_name("model name\t: cut") == "cut");
  CHECK(ddp::detail::cpu_name("model name").empty());
  CHECK(ddp::detail::cpu_name("").empty());
}

TEST_CASE("the name of a program may have spaces") {
  CHECK(ddp::detail::program_name(std::string("/my runs/train it\0--config\0a/b\0", 32)) ==
        "train it");
  CHECK(ddp::detail::program_name(std::string("train\0", 6)) == "train");
  CHECK(ddp::detail::program_name("").empty());
}

TEST_CASE("the settings select the files") {
  TemporaryFolder folder;
  auto options = written_to(folder);
  options.run_name = "named";
  const auto [csv, jsonl] =
      GENERATE(table<bool, bool>({{true, true}, {true, false}, {false, true}}));
  options.csv = csv;
  options.jsonl = jsonl;
  MetricsFiles files(options, job_77(), /*is_main=*/true);
  files.write_settings("a: 1\n");
  files.add_step({.step = 3, .loss = 0.5});
  files.add_evaluation({.done = 3, .epoch = 1.5, .loss = 0.25});
  files.add_epoch({.epoch = 1}, kTwoRanks);
  const auto exists = [&](const std::string& name) {
    return std::filesystem::exists(folder.file("named/" + name));
  };
  REQUIRE(exists("steps.csv") == csv);
  REQUIRE(exists("evals.csv") == csv);
  REQUIRE(exists("epochs.csv") == csv);
  REQUIRE(exists("steps.jsonl") == jsonl);
  REQUIRE(exists("evals.jsonl") == jsonl);
  REQUIRE(exists("epochs.jsonl") == jsonl);
  REQUIRE(read_file(folder.file("named/settings.txt")) == "a: 1\n");
  if (csv) {
    auto row = first_row(folder.file("named/evals.csv"));
    REQUIRE(row["step"] == "3");
    REQUIRE(row["epoch"] == "1.5");
    REQUIRE(row["eval_loss"] == "0.25");
    REQUIRE(row["eval_accuracy"].empty());
  }
}

TEST_CASE("the slashes of a job's id do not make folders") {
  TemporaryFolder folder;
  auto launch = job_77();
  launch.job_id = "team/77";
  MetricsFiles files(written_to(folder), launch, /*is_main=*/true);
  CHECK(files.path() == folder.file("team_77"));
}

TEST_CASE("a line that a full disk cut does not spoil the next one") {
  TemporaryFolder folder;
  ddp::detail::RunFolder run(folder.path(), "run");
  struct rlimit usual {};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &usual) == 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  auto full = usual;
  full.rlim_cur = 9;
  run.append("rows", "first");
  REQUIRE(setrlimit(RLIMIT_FSIZE, &full) == 0);
  run.append("rows", "second");
  REQUIRE(setrlimit(RLIMIT_FSIZE, &usual) == 0);
  signal(SIGXFSZ, old_handler);
  run.append("rows", "third");
  CHECK(read_file(folder.file("run/rows")) == "first\nthird\n");
}

TEST_CASE("other ranks, and runs without a folder, write nothing") {
  TemporaryFolder folder;
  auto options = written_to(folder);
  const bool is_main = GENERATE(true, false);
  options.dir = is_main ? "" : folder.path();
  MetricsFiles files(options, job_77(), is_main);
  files.add_step({.step = 3});
  REQUIRE(files.path().empty());
  REQUIRE(std::filesystem::is_empty(folder.path()));
}
