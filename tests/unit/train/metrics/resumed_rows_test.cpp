// SPDX-License-Identifier: Apache-2.0
// Rows that an earlier start wrote and a resumed run writes again.
#include <algorithm>
#include <filesystem>
#include <sstream>

#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "train/metrics/files/metrics_files.hpp"
#include "train/metrics/files/metrics_writers.hpp"
#include "train/metrics/metrics_format.hpp"
#include "unit/train/checkpoint/crash_model.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using ddp::detail::MetricsFiles;
using ddp::detail::remove_rows_from;
using ddp::detail::RunFolder;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;

const ddp::detail::JobNumbers kOneRank(std::vector<ddp::detail::RankNumbers>(1));

// One start of a run: logs each second step, evaluates each fourth, has epochs of four steps.
void run_steps(const TemporaryFolder& folder, int64_t begin, int64_t end) {
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run_name = "run";
  MetricsFiles files(options, {}, /*is_main=*/true);
  for (int64_t step = begin; step < end; ++step) {
    files.begin(step);
    const int64_t done = step + 1;
    if (done % 2 == 0) {
      files.add_step({.step = done, .loss = static_cast<double>(begin)});
    }
    if (done % 4 == 0) {
      files.add_evaluation({.done = done, .loss = static_cast<double>(begin)});
      files.add_epoch({.epoch = step / 4}, kOneRank);
    }
  }
}

// The cells of a column of a CSV file whose cells have no quotes, joined by blanks.
std::string column(const std::string& path, const std::string& name) {
  std::istringstream in(read_file(path));
  std::string line, cell, text;
  std::getline(in, line);
  const auto columns = ddp::detail::csv_fields(line);
  const auto place = std::find(columns.begin(), columns.end(), name) - columns.begin();
  while (std::getline(in, line)) {
    text += (text.empty() ? "" : " ") + ddp::detail::csv_fields(line).at(place);
  }
  return text;
}

int64_t num_lines(const std::string& path) {
  const auto text = read_file(path);
  return std::count(text.begin(), text.end(), '\n');
}

}  // namespace

TEST_CASE("a resumed run has no step, evaluation or epoch twice") {
  TemporaryFolder folder;
  const auto file = [&](const std::string& name) { return folder.file("run/" + name); };
  run_steps(folder, 0, 10);  // killed; the newest checkpoint has 5 steps
  run_steps(folder, 5, 12);
  CHECK(column(file("steps.csv"), "step") == "2 4 6 8 10 12");
  CHECK(column(file("steps.csv"), "loss") == "0 0 5 5 5 5");
  CHECK(column(file("evals.csv"), "step") == "4 8 12");
  CHECK(column(file("evals.csv"), "eval_loss") == "0 5 5");
  CHECK(column(file("epochs.csv"), "epoch") == "0 1 2");
  CHECK(num_lines(file("steps.jsonl")) == 6);
  CHECK(num_lines(file("evals.jsonl")) == 3);
  CHECK(num_lines(file("epochs.jsonl")) == 3);

  run_steps(folder, 12, 16);  // after a clean stop nothing is repeated
  CHECK(column(file("steps.csv"), "step") == "2 4 6 8 10 12 14 16");

  run_steps(folder, 0, 4);  // another run of that name
  CHECK(column(file("steps.csv"), "step") == "2 4");
  CHECK(num_lines(file("epochs.jsonl")) == 1);
  for (const auto& entry : std::filesystem::directory_iterator(folder.file("run"))) {
    CHECK_FALSE(entry.is_directory());
  }
}

TEST_CASE("lines without a number stay, and an unfinished last line goes") {
  TemporaryFolder folder;
  RunFolder run(folder.path(), "run");
  const std::string csv = "job,step\n\"a,b\",1\nc,\nd,3\n",
                    jsonl = "{\"step\":1}\n[]\n{\"step\":\"x\"}\n";
  write_file(folder.file("run/steps.csv"), csv);
  write_file(folder.file("run/steps.jsonl"), jsonl + "{\"st");
  const auto said = testing::stderr_of([&] { remove_rows_from(run, "steps", "step", 3); });
  CHECK_THAT(said, Catch::Contains("/run had steps of an earlier start from step 3 on"));
  CHECK(read_file(folder.file("run/steps.csv")) == "job,step\n\"a,b\",1\nc,\n");
  CHECK(read_file(folder.file("run/steps.jsonl")) == jsonl);
  const auto nothing = testing::stderr_of([&] {
    remove_rows_from(run, "steps", "step", 3);
    remove_rows_from(run, "evals", "step", 0);
  });
  CHECK(nothing.empty());
  CHECK_FALSE(std::filesystem::exists(folder.file("run/evals.csv")));
}

TEST_CASE("a crash at any call of the removal leaves the rows of before or after it") {
  const std::string before = "step,loss\n1,4\n2,3\n3,2\n4,1", after = "step,loss\n1,4\n2,3\n";
  TemporaryFolder folder;
  const auto path = folder.file("run");
  std::filesystem::create_directory(path);
  write_file(path + "/steps.csv", before);
  testing::RecordingOps recording;
  testing::CrashModel model(path);
  {
    RunFolder run(folder.path(), "run", "", recording);
    remove_rows_from(run, "steps", "step", 3);
    CHECK(read_file(path + "/steps.csv") == after);
  }
  int before_seen = 0, after_seen = 0;
  const auto check = [&](const std::set<std::size_t>& kept, double data_kept) {
    TemporaryFolder state;
    model.write_state(state.file("run"), kept, data_kept);
    const auto rows = read_file(state.file("run/steps.csv"));
    REQUIRE((rows == before || rows == after));
    ++(rows == before ? before_seen : after_seen);
    RunFolder resumed(state.path(), "run");
    remove_rows_from(resumed, "steps", "step", 3);
    REQUIRE(read_file(state.file("run/steps.csv")) == after);
  };
  for (std::size_t call = 0; call <= recording.calls.size(); ++call) {
    const auto open = model.open_changes();
    for (const double data_kept : {1.0, 0.5, 0.0}) {
      check({open.begin(), open.end()}, data_kept);
      check({}, data_kept);
      for (const auto one : open) {
        check({one}, data_kept);
      }
    }
    if (call < recording.calls.size()) {
      model.apply(recording.calls[call]);
    }
  }
  CHECK(before_seen > 10);
  CHECK(after_seen > 5);
}
