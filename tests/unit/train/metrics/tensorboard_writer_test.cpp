// SPDX-License-Identifier: Apache-2.0
// Event files: framing, and which records a resumed run keeps. tensorboard_files.py reads the
// events by TensorBoard's own package.
#include "train/metrics/files/tensorboard_writer.hpp"

#include <algorithm>
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

std::string scalar_record(int64_t step) {
  return tensorboard::framed(
      tensorboard::scalars_event({.unix_time = 1, .step = step}, {{"steps/loss", 0.5}}));
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

TEST_CASE("records of later steps are dropped, and the file version stays") {
  const auto version = tensorboard::framed(tensorboard::file_version_event({}));
  const auto file = version + scalar_record(10) + scalar_record(300) + scalar_record(20);
  REQUIRE(tensorboard::records_before(file, 1000) == file);
  REQUIRE(tensorboard::records_before(file, 300) ==
          version + scalar_record(10) + scalar_record(20));
  REQUIRE(tensorboard::records_before(file, 20) == version + scalar_record(10));
  REQUIRE(tensorboard::records_before(file, 0) == version);
}

TEST_CASE("records end where a crash cut the file or damaged it") {
  const auto version = tensorboard::framed(tensorboard::file_version_event({}));
  const auto whole = version + scalar_record(10);
  const auto cut = GENERATE(1, 4, 11, 20);
  REQUIRE(tensorboard::records_before(whole + scalar_record(20).substr(0, cut), 1000) == whole);
  auto damaged = whole + scalar_record(20) + scalar_record(30);
  damaged[whole.size() + 14] ^= 1;
  REQUIRE(tensorboard::records_before(damaged, 1000) == whole);
  REQUIRE(tensorboard::records_before("", 1000).empty());
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
  // Of another writer: its events are not this run's.
  const auto other = folder.file("run") + "/of_torch.tfevents.1";
  const auto others = tensorboard::framed(tensorboard::file_version_event({})) + scalar_record(24);
  testing::write_file(other, others);
  std::filesystem::rename(other, folder.file("run") + "/events.out.tfevents.9999999999.host.1.0");
  auto first = event_files(folder.file("run"));
  REQUIRE(read_file(first.back()) == others);
  const auto foreign = first.back();
  first.pop_back();
  REQUIRE(first.size() == (options.tensorboard ? 1 : 0));
  if (options.tensorboard) {
    const auto before = read_file(first[0]);
    make_start(20, {30});
    REQUIRE(event_files(folder.file("run")).size() == 3);
    REQUIRE(read_file(foreign) == others);
    REQUIRE(read_file(first[0]) == tensorboard::records_before(before, 21));
    REQUIRE(read_file(first[0]).size() < before.size());
    make_start(0, {});  // repeats everything
    REQUIRE(read_file(first[0]) == tensorboard::records_before(before, 0));
  }
}
