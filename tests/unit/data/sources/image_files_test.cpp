// SPDX-License-Identifier: Apache-2.0
// Single image files are prepared as those of a data set's test split.
#include "ddp/data/image_files.hpp"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"

using data_test::contains;
using data_test::message_of;
using data_test::write_file;

namespace {

/// Two classes with images of several sizes; returns the test split's files in its order.
std::vector<std::string> write_images(const std::filesystem::path& folder) {
  std::vector<std::string> paths;
  uint64_t seed = 10;  // names of one length sort as numbers
  for (const char* split : {"train", "test"}) {
    for (const char* name : {"cat", "dog"}) {
      for (const auto& [width, height] : {std::pair{90, 70}, {64, 120}, {33, 33}}) {
        const auto path = folder / split / name / (std::to_string(seed) + ".jpg");
        write_file(path, data_test::make_jpeg(width, height, TJSAMP_420, seed++));
        if (std::string(split) == "test") {
          paths.push_back(path.string());
        }
      }
    }
  }
  return paths;
}

}  // namespace

TEST_CASE("image files are resized, cropped and normalised as the test split", "[image_files]") {
  const data_test::TempFolder folder;
  const auto paths = write_images(folder.path());
  ddp::DataOptions options{.path = folder.path()};
  SECTION("the data's own sizes and statistics") {}
  SECTION("small images") {
    options.image_size = 24;
    options.eval_resize = 31;
  }
  SECTION("large images") {
    options.image_size = 80;
    options.mean = {0.1, 0.2, 0.3};
    options.std = {0.5, 0.6, 0.7};
  }
  SECTION("grey images, decoded at a part of their size") {
    options.image_size = 20;
    options.channels = 1;
    options.eval_decode = ddp::EvalDecode::Scaled;
    options.cache = GENERATE(ddp::CachePolicy::Auto, ddp::CachePolicy::Off);
    options.augment = ddp::Augment::RandomResizedCrop;
  }
  const auto expected = ddp::make_dataset(options, ddp::Split::Test);
  // What does not apply to single files.
  options.num_samples = 1;
  options.num_classes = 2;
  options.corrupt = ddp::CorruptPolicy::Skip;
  const auto files = ddp::open_image_files(options, paths);
  REQUIRE(files->size() == 6);
  REQUIRE(files->layout()->shape == expected->layout()->shape);
  for (int64_t i = 0; i < files->size(); ++i) {
    CHECK(at::equal(files->get(i).data, expected->get(i).data));
    CHECK(files->get(i).target.item<int64_t>() == i);
  }
  CHECK_FALSE(at::equal(files->get(0).data, files->get(1).data));
}

TEST_CASE("files that are no images are errors with the fix", "[image_files]") {
  const data_test::TempFolder folder;
  auto paths = write_images(folder.path());
  ddp::DataOptions options{.path = folder.path(), .corrupt = ddp::CorruptPolicy::Skip};
  options.image_size = 80;  // decoded when a sample is read
  const auto error_with = [&](const std::string& path) {
    paths[1] = path;
    return message_of<ddp::DataError>([&] { ddp::open_image_files(options, paths)->get(1); });
  };
  const auto missing = (folder.path() / "none.jpg").string();
  CHECK(error_with(missing) ==
        "the image file " + missing + " does not exist; fix: check the path");
  CHECK(contains(error_with(folder.path()), "is a folder, not an image file; fix: name the files"));
  const auto text = folder.path() / "text.jpg";
  write_file(text, "no image");
  CHECK(contains(error_with(text), text.string() + " at offset 0: not a JPEG"));
  CHECK(contains(error_with(text), "; fix: leave the file out, or convert it to a good JPEG"));
}
