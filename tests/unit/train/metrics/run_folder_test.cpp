// SPDX-License-Identifier: Apache-2.0
// A run folder in a place that other users can write to: what they put there is not followed, not
// waited for, and not read.
#include "train/metrics/files/run_folder.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>

#include "core/files/plan_file.hpp"
#include "core/log/log_file.hpp"
#include "ddp/core/logging.hpp"
#include "support/catch.hpp"
#include "support/named_pipe.hpp"
#include "support/stderr_of.hpp"
#include "train/metrics/files/metrics_files.hpp"
#include "train/metrics/metrics_format.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using ddp::detail::MetricsFiles;
using ddp::detail::RunFolder;
using testing::read_file;
using testing::TemporaryFolder;
namespace fs = std::filesystem;

constexpr const char* kSecret = "time,step,loss\n7,9999,1\n";

ddp::MetricsOptions options_in(const TemporaryFolder& folder) {
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run_name = "run";
  return options;
}

// Everything that writes into a run folder.
void run_once(const TemporaryFolder& folder) {
  MetricsFiles files(options_in(folder), {}, /*is_main=*/true);
  ddp::detail::append_log_to(files.path() + "/log.txt");
  ddp::log_info("a line");
  files.write_settings("train.max_steps=1");
  files.begin(3);
  files.add_step({.step = 4, .loss = 1.5});
  const std::vector<ddp::detail::RankNumbers> ranks(1);
  files.write_ranks(4, 4, ranks, {});
  files.add_evaluation({.done = 4, .loss = 2.5});
  files.add_epoch({.epoch = 0}, ddp::detail::JobNumbers(ranks));
  ddp::detail::append_log_to("/dev/null/none");
}

// The names of a run's files, from a run.
std::vector<std::string> names_of_a_run() {
  TemporaryFolder folder;
  run_once(folder);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.file("run"))) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with("events.")) {  // has the process and the second in its name
      names.push_back(name);
    }
  }
  names.push_back(ddp::detail::kOwnerName);  // the end of the run removes it
  return names;
}

const std::map<std::string, std::function<void(const std::string&, const std::string&)>> kPlants = {
    {"link", [](auto& path, auto& target) { fs::create_symlink(target, path); }},
    {"link to nothing",
     [](auto& path, auto& target) { fs::create_symlink(target + "_new", path); }},
    {"link to /dev/zero", [](auto& path, auto&) { fs::create_symlink("/dev/zero", path); }},
    {"pipe", [](auto& path, auto&) { ::mkfifo(path.c_str(), 0600); }},
    {"folder", [](auto& path, auto&) { fs::create_directory(path); }}};

}  // namespace

TEST_CASE("no file of a run follows what was planted in its place") {
  const auto names = names_of_a_run();
  CHECK(names.size() >= 9);  // settings, log, ranks, and three tables as CSV and JSONL
  for (const auto& name : names) {
    for (const auto& [kind, plant] : kPlants) {
      INFO(name << ": " << kind);
      TemporaryFolder folder;
      const auto secret = folder.file("secret");
      testing::write_file(secret, kSecret);
      fs::create_directory(folder.file("run"));
      plant(folder.file("run/" + name), secret);
      if (name == ".owner" && kind == "folder") {
        continue;  // another test: a folder that nobody can take
      }
      const auto said = testing::stderr_of([&] { run_once(folder); });
      CHECK(read_file(secret) == kSecret);
      CHECK_FALSE(fs::exists(secret + "_new"));
      // The other files of the run are there.
      CHECK(fs::is_regular_file(folder.file(name == "log.txt" ? "run/steps.csv" : "run/log.txt")));
      for (const auto& entry : fs::recursive_directory_iterator(folder.file("run"))) {
        if (entry.is_regular_file() && !entry.is_symlink()) {
          CHECK(read_file(entry.path()).find("7,9999,1") == std::string::npos);  // nothing was read
        }
      }
    }
  }
}

TEST_CASE("a planted name of a file that is about to be replaced is not used") {
  TemporaryFolder folder;
  const auto secret = folder.file("secret");
  testing::write_file(secret, kSecret);
  fs::create_directory(folder.file("run"));
  fs::create_symlink(secret, folder.file("run/settings.txt.new"));
  testing::write_file(folder.file("run/ranks.json.tmp-0123456789abcdef"), "of a killed run");
  run_once(folder);
  CHECK(read_file(secret) == kSecret);
  CHECK(read_file(folder.file("run/settings.txt")) == "train.max_steps=1");
  for (const auto& entry : fs::directory_iterator(folder.file("run"))) {
    CHECK(entry.path().string().find(".tmp-") == std::string::npos);
  }
}

TEST_CASE("a run folder that is a link or another user's is refused") {
  TemporaryFolder folder;
  const auto target = folder.file("target");
  fs::create_directory(target);
  std::string why = "it is a symbolic link";
  bool is_possible = true;
  SECTION("a link") {
    fs::create_directory_symlink(target, folder.file("run"));
  }
  SECTION("another user's") {
    fs::create_directory(folder.file("run"));
    is_possible = ::chown(folder.file("run").c_str(), 1000, 1000) == 0 && ::geteuid() != 1000;
    why = "it belongs to user 1000";
  }
  if (is_possible) {  // only root gives files away
    CHECK_THROWS_WITH(RunFolder(folder.path(), "run"),
                      "the run folder " + folder.file("run") +
                          " (metrics.dir, metrics.run_name) is refused: " + why +
                          "; fix: set another metrics.run_name, or a metrics.dir of your own");
    CHECK(fs::is_empty(target));
  }
}

TEST_CASE("a named pipe above the working folder does not delay a run") {
  TemporaryFolder folder;
  fs::create_directories(folder.file(".git"));
  fs::create_directories(folder.file("work"));
  const testing::NamedPipe pipe(folder.file(".git/HEAD"));
  CHECK(ddp::detail::read_git_commit(folder.file("work")).empty());
  CHECK_FALSE(pipe.was_waited_for());
}
