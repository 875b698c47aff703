// SPDX-License-Identifier: Apache-2.0
#include "ddp/detail/file_content.hpp"

#include <string>
#include <utility>

#include "support/catch.hpp"

using namespace std::string_literals;

TEST_CASE("a file's first bytes name its contents", "[file_content]") {
  const std::pair<std::string, std::string> cases[] = {
      {"", "an empty file"},
      {"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"},
      {" \n<HTML><head>", "an HTML page"},
      {"<?xml version=\"1.0\"?><Error>", "an XML document"},
      {"{\"error\": 404}", "JSON text"},
      {"[1, 2]", "JSON text"},
      {"a na\xc3\xafve line\r\n", "text"},
      {" \n ", "text of blanks"},
      {"PK\3\4\x14\0\0\0\0\0x.npy"s, "a zip archive (such as .npz)"},
      {"PK\3\4\0\0\10\10\0\0model/data.pkl"s, "a pickle"},
      {"\x80\4\x95\0"s, "a pickle"},
      {"\x1f\x8b\10", "a gzip archive"},
      {std::string(257, 'x') + "ustar", "a tar archive"},
      {"GIF89a", "a GIF image"},
      {"RIFF\1\2\3\4WEBPVP8 ", "a WebP image"},
      {"BM\1\2\3\0\0\0\0\0\1"s, "a BMP image"},
      {"BMW is text", "text"},
      {"\x40\0\0\0\0\0\0\0{\"a\":"s, "a safetensors file"},
      {"GGUF\3\0\0\0"s, "a GGUF model"},
      {"\0\5\x16\7\0\2"s, "a macOS resource file"},
      {std::string(512, '\0'), "a file of zero bytes"},
  };
  for (const auto& [bytes, name] : cases) {
    CHECK_THAT(ddp::describe_content(bytes), Catch::StartsWith(name));
    CHECK_THAT(ddp::content_note(bytes), Catch::StartsWith("; it is " + name));
  }
  for (const std::string& unknown : {"\1\2\3\4"s, std::string(300, '\xee') + '\1'}) {
    CHECK(ddp::describe_content(unknown).empty());
    CHECK(ddp::content_note(unknown).empty());
  }
}
