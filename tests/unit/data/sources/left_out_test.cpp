// SPDX-License-Identifier: Apache-2.0
// Files that the readers of images leave out are counted, and labels are not lost.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/data/dataset.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/tar_writer.hpp"

namespace fs = std::filesystem;
using data_test::contains;
using data_test::message_of;
using data_test::tar_end;
using data_test::tar_entry;
using data_test::TempFolder;
using data_test::write_file;
using ddp::make_dataset;
using ddp::Split;
using Entries = std::vector<std::pair<std::string, std::string>>;

namespace {

const std::string& small_jpeg() {
  static const std::string bytes = data_test::make_jpeg(40, 30);
  return bytes;
}

void write_shard(const fs::path& path, const Entries& entries) {
  std::string bytes;
  for (const auto& [name, contents] : entries) {
    bytes += tar_entry(name, contents);
  }
  write_file(path, bytes + tar_end());
}

// The error of a training shard with these files.
std::string refusal(const Entries& entries) {
  TempFolder folder;
  write_shard(folder.path() / "train-000.tar", entries);
  return message_of<ddp::DataError>([&] { (void)make_dataset({.path = folder.path()}); });
}

std::vector<int64_t> labels_of(const ddp::Dataset& dataset) {
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    labels.push_back(dataset.get(i).target.item<int64_t>());
  }
  return labels;
}

// What making the data set logs, below "data.path=…" or the folder's path.
std::string told(const ddp::DataOptions& options, Split split = Split::Train) {
  const auto text = testing::stderr_of([&] { (void)make_dataset(options, split); });
  CHECK(testing::num_found(text, "leaves out") <= 1);
  return text;
}

}  // namespace

TEST_CASE("the files of a sample in a shard are neighbours", "[left_out]") {
  const std::string fix = "fix: write the files of a sample one after the other";
  // All images, then all labels. Without the folder d the images would have no class either.
  auto message = refusal({{"d/0.jpg", small_jpeg()}, {"d/1.jpg", small_jpeg()}, {"d/0.cls", "0"}});
  const auto padded = (small_jpeg().size() + 511) / 512 * 512;
  CHECK(contains(message, "train-000.tar at offset " + std::to_string(2 * padded + 3 * 512) +
                              ": d/0.cls labels no image: no d/0.jpg, .jpeg, .png or .webp is"));
  CHECK(contains(message, fix));
  // A file of another sample between them.
  message = refusal({{"d/0.jpg", small_jpeg()}, {"d/notes.txt", "x"}, {"d/0.cls", "0"}});
  CHECK(contains(message, "d/0.cls labels no image"));
  // An image that is not read.
  CHECK(contains(refusal({{"d/0.gif", "GIF89a"}, {"d/0.cls", "0"}}), "d/0.cls labels no image"));
  CHECK(contains(refusal({{"d/0.2020.jpg", small_jpeg()}, {"d/0.cls", "0"}}), "labels no image"));
  // The order in a sample is free.
  CHECK(refusal({{"d/0.cls", "1"},
                 {"d/0.jpg", small_jpeg()},
                 {"d/1.jpg", small_jpeg()},
                 {"d/1.cls", "0"}})
            .empty());
}

TEST_CASE("samples of a set are all labelled by .cls or all by their folder", "[left_out]") {
  auto message = refusal({{"d/0.jpg", small_jpeg()}, {"d/0.cls", "0"}, {"d/1.jpg", small_jpeg()}});
  CHECK(contains(message, "d/1.jpg lacks a file d/1.cls, unlike the samples before it; fix: "));
  message = refusal({{"d/0.jpg", small_jpeg()}, {"d/1.jpg", small_jpeg()}, {"d/1.cls", "0"}});
  CHECK(contains(message, "d/1.jpg has a file d/1.cls, unlike the samples before it"));
  message = refusal({{"d/0.jpg", small_jpeg()}, {"d/0.png", small_jpeg()}, {"d/0.cls", "0"}});
  CHECK(contains(message, "d/0.png is the second file of its kind in the sample d/0"));
  message = refusal({{"d/0.jpg", small_jpeg()}, {"d/0.cls", "0"}, {"d/0.cls", "1"}});
  CHECK(contains(message, "d/0.cls is the second file of its kind"));
}

TEST_CASE("hidden files in a shard do not part a sample", "[left_out]") {
  TempFolder folder;
  Entries entries;
  for (int i = 0; i < 6; ++i) {
    const std::string key = std::to_string(i);
    entries.emplace_back("d/._" + key + ".jpg", std::string("\0\5\x16\7", 4));
    entries.emplace_back("d/" + key + ".jpg", small_jpeg());
    entries.emplace_back("d/._" + key + ".cls", std::string("\0\5\x16\7", 4));
    entries.emplace_back("d/" + key + ".cls", std::to_string(i % 3));
  }
  write_shard(folder.path() / "train-000.tar", entries);
  const auto text = told({.path = folder.path()});
  CHECK(contains(text,
                 "(training split) leaves out: 12 hidden files (d/._0.jpg, d/._0.cls, "
                 "d/._1.jpg, …)"));
  const auto dataset = make_dataset({.path = folder.path()});
  CHECK(labels_of(*dataset) == std::vector<int64_t>{0, 1, 2, 0, 1, 2});
}

TEST_CASE("shards tell what they leave out", "[left_out]") {
  TempFolder folder;
  const fs::path root = folder.path();
  write_shard(root / "train-000.tar", {{"a/0.jpg", small_jpeg()},
                                       {"a/0.json", "{}"},
                                       {"a/photo.2020.jpg", small_jpeg()},
                                       {"b/1.jpg", small_jpeg()},
                                       {"b/1.txt", "x"}});
  const auto text = told({.path = root});
  CHECK(contains(text,
                 "leaves out: 2 files with other extensions (a/0.json, b/1.txt), 1 images "
                 "with a second dot in their names (a/photo.2020.jpg)"));
  CHECK(contains(text, "warning"));
  write_shard(root / "train-000.tar", {{"a/0.jpg", small_jpeg()}, {"b/1.jpg", small_jpeg()}});
  CHECK(told({.path = root}).empty());
  // Files beside the shards: compressed ones are missed, others are not.
  write_file(root / "train-001.tar.gz", "x");
  CHECK(contains(told({.path = root}), "warning"));
  fs::rename(root / "train-001.tar.gz", root / "train.txt");
  CHECK(contains(told({.path = root}), "leaves out: 1 files that are no .tar shards (" +
                                           (root / "train.txt").string() + ")"));
  CHECK(!contains(told({.path = root}), "warning"));
}

TEST_CASE("of two test splits one is used, and the other is told", "[left_out]") {
  TempFolder folder;
  const fs::path root = folder.path();
  const Entries one{{"a/0.jpg", small_jpeg()}, {"b/1.jpg", small_jpeg()}};
  Entries two = one;
  two.emplace_back("b/2.jpg", small_jpeg());
  write_shard(root / "shards/test-000.tar", one);
  write_shard(root / "shards/val-000.tar", two);
  const ddp::DataOptions shards{.path = root / "shards"};
  CHECK(make_dataset(shards, Split::Test)->size() == 2);
  CHECK(contains(told(shards, Split::Test),
                 "(test split) leaves out: 1 shards of a second test "
                 "split (" +
                     (root / "shards/val-000.tar").string() + ")"));
  fs::remove(root / "shards/test-000.tar");
  CHECK(make_dataset(shards, Split::Test)->size() == 3);
  CHECK(told(shards, Split::Test).empty());

  for (const char* name : {"train/a/0.jpg", "train/b/1.jpg", "test/a/0.jpg", "test/b/1.jpg",
                           "val/a/0.jpg", "val/b/1.jpg", "val/b/2.jpg"}) {
    write_file(root / "folders" / name, small_jpeg());
  }
  const ddp::DataOptions folders{.path = root / "folders"};
  CHECK(make_dataset(folders, Split::Test)->size() == 2);
  CHECK(contains(told(folders, Split::Test),
                 "1 folders of a second test split (" + (root / "folders/val").string() + ")"));
  CHECK(told(folders).empty());
}

TEST_CASE("class folders tell what they leave out", "[left_out]") {
  TempFolder folder;
  const fs::path train = folder.path() / "train";
  for (const char* name : {"a/0.jpg", "a/.jpg", "a/photo.2020.JPG", "a/1/2/3/4/5/6/7/8/deep.jpg",
                           "a/1/2/3/4/5/6/7/8/9/too_deep.jpg", "b/0.jpg", "elsewhere/0.jpg"}) {
    write_file(train / name, small_jpeg());
  }
  fs::rename(train / "elsewhere", folder.path() / "elsewhere");
  fs::create_directory_symlink(folder.path() / "elsewhere", train / "c");  // a class
  fs::create_directory_symlink(folder.path() / "elsewhere", train / "b/linked");
  fs::create_symlink(folder.path() / "elsewhere/0.jpg", train / "b/link.jpg");
  for (const char* name : {"a/x.gif", "a/y.txt", "b/z", "b/.hidden"}) {
    write_file(train / name, "x");
  }
  const ddp::DataOptions options{.path = folder.path()};
  CHECK(labels_of(*make_dataset(options)) == std::vector<int64_t>{0, 0, 0, 0, 1, 1, 2});
  auto text = told(options);
  CHECK(contains(text, train.string() + " leaves out: 4 files with other extensions (" +
                           (train / "a/x.gif").string() + ", " + (train / "a/y.txt").string() +
                           ", " + (train / "b/.hidden").string() +
                           ", …), 1 folders more than 8 "
                           "below their class folder (" +
                           (train / "a/1/2/3/4/5/6/7/8/9").string() +
                           "), 1 linked folders inside class folders (" +
                           (train / "b/linked").string() + ")"));
  CHECK(contains(text, "warning"));
  for (const char* name : {"a/1", "b/linked"}) {
    fs::remove_all(train / name);
  }
  CHECK(!contains(told(options), "warning"));
  write_file(train / "loose.jpg", small_jpeg());
  text = told(options);
  CHECK(contains(text, "1 files outside class folders (loose.jpg)"));
  CHECK(contains(text, "warning"));
}

TEST_CASE("a split of one class is worth a warning", "[left_out]") {
  TempFolder folder;
  const auto write = [&](const std::string& second) {
    write_shard(
        folder.path() / "train-000.tar",
        {{"0.jpg", small_jpeg()}, {"0.cls", "3"}, {"1.jpg", small_jpeg()}, {"1.cls", second}});
  };
  write("3");
  const ddp::DataOptions options{.path = folder.path()};
  CHECK(contains(told(options), "all 2 samples of the training split that are used have label 3"));
  write("1");
  CHECK(told(options).empty());
  ddp::DataOptions first = options;
  first.num_samples = 1;
  CHECK(told(first).empty());
}

TEST_CASE("errors of shards name the file and the offset", "[left_out]") {
  TempFolder folder;
  write_shard(folder.path() / "train-000.tar", {{"cat/0.jpg", small_jpeg()}});
  write_shard(folder.path() / "train-001.tar",
              {{"cat/1.jpg", small_jpeg()}, {"dog/2.jpg", small_jpeg()}});
  write_file(folder.path() / "classes.txt",
             "\xEF\xBB\xBF"
             "cat\r\n\r\ncow\r\n");
  const auto padded = (small_jpeg().size() + 511) / 512 * 512;
  CHECK(contains(message_of<ddp::DataError>([&] { (void)make_dataset({.path = folder.path()}); }),
                 "train-001.tar at offset " + std::to_string(padded + 2 * 512) +
                     ": class dog is not in classes.txt"));
  // Line ends of Windows and a byte order mark are no parts of names.
  write_file(folder.path() / "classes.txt",
             "\xEF\xBB\xBF"
             "cat\r\n\r\ndog\r\n");
  const auto dataset = make_dataset({.path = folder.path()});
  CHECK(dataset->class_names() == std::vector<std::string>{"cat", "dog"});
  CHECK(labels_of(*dataset) == std::vector<int64_t>{0, 0, 1});
}
