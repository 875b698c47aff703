// SPDX-License-Identifier: Apache-2.0
// The log's file in a run folder.
#include "core/log/log_file.hpp"

#include "ddp/core/logging.hpp"
#include "support/catch.hpp"
#include "unit/train/temporary_folder.hpp"

using testing::read_file;
using testing::TemporaryFolder;

TEST_CASE("log lines are appended to the file of the last call") {
  TemporaryFolder folder;
  testing::write_file(folder.file("a.txt"), "earlier\n");
  ddp::detail::append_log_to(folder.file("a.txt"));
  ddp::log_warning("first");
  ddp::log_debug("below the level");
  ddp::detail::append_log_to(folder.file("b.txt"));
  ddp::log_error("second");
  const auto first = read_file(folder.file("a.txt"));
  REQUIRE(first.starts_with("earlier\n["));
  REQUIRE(first.ends_with("[warning] first\n"));
  REQUIRE(first.find("below") == std::string::npos);
  REQUIRE(read_file(folder.file("b.txt")).ends_with("[error] second\n"));
}

TEST_CASE("a file that cannot be opened leaves the log on standard error") {
  REQUIRE_NOTHROW(ddp::detail::append_log_to("/dev/null/log.txt"));
  REQUIRE_NOTHROW(ddp::log_warning("still logged"));
}
