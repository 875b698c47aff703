// SPDX-License-Identifier: Apache-2.0
// A file that is not what its name says is named for what it is, by every reader of libddp.
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/data/tensor_dataset.hpp"
#include "ddp/detail/list_safetensors.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/tar_writer.hpp"

namespace fs = std::filesystem;
using data_test::contains;
using data_test::TempFolder;
using data_test::write_file;
using ddp::make_dataset;

namespace {

// Bytes of a file, and the name of their kind.
const std::vector<std::pair<std::string, std::string>>& contents() {
  using namespace std::string_literals;
  static const std::vector<std::pair<std::string, std::string>> all = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1034\n",
       "a Git LFS pointer (git lfs pull"},
      {"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", "an HTML page"},
      {"Entry not found", "text"},
      {"PK\3\4\0\0\10\10\0\0\0\0\0\0\0\0\0\0\20\0\22\0archive/data.pklFB"s,
       "a pickle of Python objects"},
      {"\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.\x80\2M\xe9\3.", "a pickle of Python objects"},
      {"\x37\x7a\xbc\xaf\x27\x1c\0\4"s + std::string(40, '\1'), "a 7z archive"},
      {"\x28\xb5\x2f\xfd\4\0\x51\0"s + std::string(40, '\2'), "a zstd archive"},
      {std::string(700, '\0'), "a file of zero bytes"},
  };
  return all;
}

struct Reader {
  const char* name;
  std::string file;  // in a folder, which is the argument of `read`
  std::function<void(const std::string&)> read;
};

std::vector<Reader> readers() {
  const auto images = [](const std::string& folder) {
    (void)make_dataset({.path = folder})->get(0);
  };
  return {
      {"weights", "model.safetensors",
       [](const std::string& folder) {
         (void)ddp::load_safetensors(folder + "/model.safetensors");
       }},
      {"names of weights", "model.safetensors",
       [](const std::string& folder) {
         (void)ddp::list_safetensors(folder + "/model.safetensors");
       }},
      {"array", "x.npy", [](const std::string& folder) { (void)ddp::load_npy(folder + "/x.npy"); }},
      {"image", "train/a/0.jpg", images},
      {"shard", "train-000.tar", images},
      {"CIFAR-10", "data_batch_1.bin", images},
      {"MNIST", "train-images-idx3-ubyte.gz", images},
  };
}

}  // namespace

TEST_CASE("every reader names a file of other contents", "[wrong_content]") {
  for (const Reader& reader : readers()) {
    for (const auto& [bytes, kind] : contents()) {
      TempFolder folder;
      write_file(folder.path() / reader.file, bytes);
      std::string message;
      try {
        reader.read(folder.path().string());
      } catch (const ddp::Error& error) {
        message = error.what();
      }
      INFO(reader.name << ": " << message);
      CHECK(contains(message, "it is " + kind));
      CHECK(contains(message, reader.file));
    }
  }
}

TEST_CASE("a link loop is a data error that names it", "[wrong_content]") {
  const auto name = GENERATE(as<std::string>{}, "train-images-idx3-ubyte", "data_batch_1.bin",
                             "fine_label_names.txt", "train", "");
  TempFolder folder;
  const fs::path path = folder.path() / "data";
  fs::create_directories(name.empty() ? folder.path() : path);
  const fs::path loop = name.empty() ? path : path / name;
  fs::create_symlink(loop, loop);
  std::string message;
  try {
    (void)make_dataset({.path = path});
  } catch (const ddp::DataError& error) {
    message = error.what();
  }
  INFO(message);
  CHECK(contains(message, "cannot read " + loop.string()));
  CHECK(contains(message, "fix: check the path, its links and its permissions"));
}
