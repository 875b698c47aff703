// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "data/sources/tar_index.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/tar_writer.hpp"

using data_test::contains;
using data_test::message_of;
using data_test::tar_end;
using data_test::tar_entry;
using data_test::TempFolder;
using ddp::detail::DataFile;
using ddp::detail::read_tar_index;
using ddp::detail::TarEntry;

namespace {

std::vector<TarEntry> index_of(const std::string& bytes) {
  TempFolder folder;
  const auto path = folder.path() / "x.tar";
  data_test::write_file(path, bytes);
  return read_tar_index(DataFile(path.string()));
}

std::string error_of(const std::string& bytes) {
  return message_of<ddp::DataError>([&] { index_of(bytes); });
}

}  // namespace

TEST_CASE("a tar index names files, offsets and sizes", "[tar]") {
  const auto entries = index_of(tar_entry("a.jpg", "hello") + tar_entry("dir/", "", '5') +
                                tar_entry("./dir/b.cls", "7") + tar_entry("empty", "") + tar_end());
  REQUIRE(entries.size() == 3);
  REQUIRE(entries[0].name == "a.jpg");
  REQUIRE(entries[0].offset == 512);
  REQUIRE(entries[0].size == 5);
  REQUIRE(entries[1].name == "dir/b.cls");
  REQUIRE(entries[1].offset == 512 * 4);
  REQUIRE(entries[2].size == 0);
}

TEST_CASE("names in a tar index are relative and have no empty or '.' parts", "[tar]") {
  const auto entries =
      index_of(tar_entry(".//etc/x.jpg", "a") + tar_entry("a/./b//c.jpg", "b") +
               tar_entry("./", "", '5') + tar_entry("././/.///d", "c") + tar_end());
  REQUIRE(entries.size() == 3);
  REQUIRE(entries[0].name == "etc/x.jpg");
  REQUIRE(entries[1].name == "a/b/c.jpg");
  REQUIRE(entries[2].name == "d");
  for (const char* name : {".", "./", ".//", "././."}) {
    REQUIRE(contains(error_of(tar_entry(name, "x") + tar_end()), "names no file"));
  }
  REQUIRE(contains(error_of(tar_entry(".//../x", "x") + tar_end()), "'..'"));
  REQUIRE(contains(error_of(tar_entry("//etc/x", "x") + tar_end()), "absolute"));
}

TEST_CASE("long names come from GNU and pax headers and from the ustar prefix", "[tar]") {
  const std::string name(200, 'n');
  REQUIRE(
      index_of(tar_entry("././@LongLink", name + '\0', 'L') + tar_entry("short", "x") + tar_end())
          .at(0)
          .name == name);
  const std::string record = " path=" + name + "\n";
  const auto pax = std::to_string(record.size() + 3) + record;
  REQUIRE(index_of(tar_entry("p", pax, 'x') + tar_entry("short", "x") + tar_end()).at(0).name ==
          name);
  REQUIRE(index_of(tar_entry("b", "x", '0', "dir/sub") + tar_end()).at(0).name == "dir/sub/b");
  // An extended header holds for one entry.
  REQUIRE(index_of(tar_entry("p", pax, 'x') + tar_entry("short", "x") + tar_entry("next", "y") +
                   tar_end())
              .at(1)
              .name == "next");
}

TEST_CASE("dangerous and unreadable entries are refused with their offset", "[tar]") {
  const std::string good = tar_entry("good", "x");
  REQUIRE(contains(error_of(good + tar_entry("/etc/passwd", "x") + tar_end()), "absolute"));
  REQUIRE(contains(error_of(good + tar_entry("/etc/passwd", "x") + tar_end()), "at offset 1024"));
  REQUIRE(contains(error_of(tar_entry("a/../b", "x") + tar_end()), "'..'"));
  REQUIRE(contains(error_of(tar_entry("..", "x") + tar_end()), "'..'"));
  REQUIRE(contains(error_of(tar_entry("b", "x", '0', "../up") + tar_end()), "'..'"));
  REQUIRE(contains(error_of(tar_entry("a..b/..c", "x")), "end mark"));  // these dots are allowed
  REQUIRE(contains(error_of(tar_entry("link", "", '1') + tar_end()), "link"));
  REQUIRE(contains(error_of(tar_entry("link", "", '2') + tar_end()), "link"));
  for (char type : {'3', '4', '6', 'S', 'Z'}) {
    REQUIRE(contains(error_of(tar_entry("device", "", type) + tar_end()), "special"));
  }
  const std::string name(256, 'n');
  REQUIRE(
      contains(error_of(tar_entry("l", name, 'L') + tar_entry("s", "x") + tar_end()), "256 bytes"));
  REQUIRE(contains(error_of(tar_entry("big", "x", '0', "", int64_t{1} << 32) + tar_end()),
                   "truncated"));
  REQUIRE(contains(error_of(tar_entry("l", std::string(70000, 'x'), 'L') + tar_end()), "65536"));
  for (const char* pax :
       {"99 path=x\n", "path=x\n", "10 path=x ", "0 a=b\n", "8 nopath\n", "12 size=abc\n"}) {
    REQUIRE(contains(error_of(tar_entry("p", pax, 'x') + tar_entry("s", "x") + tar_end()), "pax"));
  }
  REQUIRE(contains(error_of(""), "end mark"));
  REQUIRE(contains(error_of(""), "fix: fetch or prepare the file again"));
  REQUIRE(
      contains(error_of(good + std::string(512, '\0') + good + tar_end()), "single zero block"));
}

TEST_CASE("every truncation and every flipped header bit of an archive is found", "[tar]") {
  const std::string bytes = tar_entry("000.jpg", std::string(700, 'j')) +
                            tar_entry("000.cls", "3") +
                            tar_entry("001.jpg", std::string(512, 'k')) + tar_end();
  REQUIRE(index_of(bytes).size() == 3);
  for (size_t length = 0; length < bytes.size(); length += length % 512 == 511 ? 1 : 73) {
    REQUIRE(!error_of(bytes.substr(0, length)).empty());
  }
  for (size_t length = 0; length < bytes.size(); length += 512) {
    REQUIRE(contains(error_of(bytes.substr(0, length)), "truncated"));
  }
  const auto entries = index_of(bytes);
  for (const TarEntry& entry : entries) {
    for (size_t at = static_cast<size_t>(entry.offset) - 512;
         at < static_cast<size_t>(entry.offset); ++at) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      INFO("byte " << at);
      // Two changes keep the checksum's number: a blank for its leading '0', or another byte after
      // its end. All other damage is detected.
      const bool same_number = (at % 512 == 148 && damaged[at] == ' ') || at % 512 == 155;
      REQUIRE(error_of(damaged).empty() == same_number);
    }
  }
}
