// SPDX-License-Identifier: Apache-2.0
// Opening files in a folder into which other users may put links, named pipes and devices.
#include "core/files/file_ops.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "support/catch.hpp"
#include "support/file_rights.hpp"
#include "unit/train/temporary_folder.hpp"

using ddp::detail::AppendedFile;
using ddp::detail::why_not_own_folder;
using testing::read_file;
using testing::TemporaryFolder;

TEST_CASE("an appended file keeps its old content and grows") {
  TemporaryFolder folder;
  const testing::Umask umask(022);
  const auto path = folder.file("rows");
  for (const std::string line : {"first\n", "second\n"}) {
    std::string why;
    const auto file = AppendedFile::open(path, why);
    REQUIRE(file != nullptr);
    CHECK(file->is_empty() == (line == "first\n"));
    CHECK(file->append(line, why));
  }
  CHECK(read_file(path) == "first\nsecond\n");
  CHECK(testing::rights_of(path) == 0644);
}

TEST_CASE("what is no regular file is not appended to, and not waited for") {
  TemporaryFolder folder;
  testing::write_file(folder.file("target"), "mine");
  const auto path = folder.file("rows");
  SECTION("a link") {
    std::filesystem::create_symlink(folder.file("target"), path);
  }
  SECTION("a link to nothing") {
    std::filesystem::create_symlink(folder.file("new"), path);
  }
  SECTION("a link to a device") {
    std::filesystem::create_symlink("/dev/zero", path);
  }
  SECTION("a folder") {
    std::filesystem::create_directory(path);
  }
  SECTION("a pipe without a reader") {
    REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  }
  std::string why;
  CHECK(AppendedFile::open(path, why) == nullptr);
  CHECK_FALSE(why.empty());
  CHECK(read_file(folder.file("target")) == "mine");
  CHECK_FALSE(std::filesystem::exists(folder.file("new")));
}

TEST_CASE("a folder of another user, a link and a file are no own folders") {
  TemporaryFolder folder;
  CHECK(why_not_own_folder(folder.path()).empty());
  CHECK(std::filesystem::is_empty(folder.path()));
  const auto link = folder.file("link");
  std::filesystem::create_directory_symlink(folder.path(), link);
  CHECK(why_not_own_folder(link) == "it is a symbolic link");
  testing::write_file(folder.file("file"), "");
  CHECK(why_not_own_folder(folder.file("file")) == "Not a directory");
  CHECK(why_not_own_folder(folder.file("missing")) == "No such file or directory");
  if (geteuid() == 0) {  // only root gives files away
    const auto other = folder.file("other");
    std::filesystem::create_directory(other);
    REQUIRE(chown(other.c_str(), 1000, 1000) == 0);
    CHECK(why_not_own_folder(other) == "it belongs to user 1000");
    CHECK(std::filesystem::is_empty(other));
  }
}
