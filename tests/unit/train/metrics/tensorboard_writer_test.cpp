// SPDX-License-Identifier: Apache-2.0
// Event files: framing, and the file of each start. tensorboard_files.py reads the events by
// TensorBoard's own package.
#include "train/metrics/files/tensorboard_writer.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "support/catch.hpp"
#include "train/metrics/files/metrics_files.hpp"
#include "train/metrics/files/tensorboard_events.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

namespace tensorboard = ddp::detail::tensorboard;
using ddp::detail::MetricsFiles;
using testing::read_file;
using testing::TemporaryFolder;

// Of the first event: behind the record's head and the field's key.
double unix_time_of(const std::string& file) {
  double time = 0;
  std::memcpy(&time, file.data() + 12 + 1, sizeof time);
  return time;
}

std::vector<std::string> event_files(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

TEST_CASE("the checksum is CRC-32C") {
  REQUIRE(tensorboard::crc32c("") == 0);
  REQUIRE(tensorboard::crc32c("123456789") == 0xe3069283u);  // the check value of the standard
}

TEST_CASE("a record is its length, its data and their masked checksums") {
  const auto record = tensorboard::framed("abc");
  REQUIRE(record.size() == 8 + 4 + 3 + 4);
  REQUIRE(record.substr(0, 8) == std::string("\3\0\0\0\0\0\0\0", 8));
  REQUIRE(record.substr(12, 3) == "abc");
}

TEST_CASE("metrics.tensorboard adds one event file for each start") {
  TemporaryFolder folder;
  ddp::MetricsOptions options;
  options.dir = folder.path();
  options.run_name = "run";
  options.tensorboard = GENERATE(true, false);
  const auto make_start = [&](int64_t steps_done, std::vector<int64_t> steps) {
    MetricsFiles files(options, {}, /*is_main=*/true);
    files.begin(steps_done);
    for (const int64_t step : steps) {
      files.add_step({.step = step, .loss = 0.5});
    }
  };
  make_start(0, {10, 20, 30});
  const auto first = event_files(folder.file("run"));
  REQUIRE(first.size() == (options.tensorboard ? 1 : 0));
  if (options.tensorboard) {
    const auto before = read_file(first[0]);
    make_start(20, {30});
    const auto files = event_files(folder.file("run"));
    REQUIRE(files.size() == 2);
    REQUIRE(files[0] == first[0]);  // names sort by time
    REQUIRE(read_file(files[0]) == before);
  }
}

TEST_CASE("a start's file begins with the version and the first step that it may write") {
  TemporaryFolder folder;
  const auto [done, first] = GENERATE(std::pair(0, 0), std::pair(20, 21));
  ddp::detail::RunFolder run(folder.path(), "run");
  ddp::detail::TensorboardWriter writer(run);
  writer.start(done);
  const auto bytes = read_file(event_files(folder.file("run")).at(0));
  const auto time = unix_time_of(bytes);
  CHECK(bytes ==
        tensorboard::framed(tensorboard::file_version_event({.unix_time = time})) +
            tensorboard::framed(tensorboard::restart_event({.unix_time = time, .step = first})));
}
