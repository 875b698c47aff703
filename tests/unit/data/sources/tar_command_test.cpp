// SPDX-License-Identifier: Apache-2.0
// The command of data/README.md that makes tar shards from folders.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/data/dataset.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/cifar10_sample.hpp"

namespace fs = std::filesystem;

namespace {

void run(const fs::path& folder, const std::string& commands) {
  const fs::path script = folder / "commands.sh";
  data_test::write_file(script, "set -euo pipefail\n" + commands);
  const std::string line = "cd '" + folder.string() + "' && bash '" + script.string() + "'";
  REQUIRE(std::system(line.c_str()) == 0);
}

// The code block of the README that calls `split`.
std::string documented_command() {
  const std::string text = data_test::read_file(fs::path(DDP_SOURCE_DIR) / "data" / "README.md");
  const auto middle = text.find("split -n r/");
  REQUIRE(middle != std::string::npos);
  const auto begin = text.rfind("```\n", middle) + 4;
  return text.substr(begin, text.find("```", middle) - begin);
}

// Label and bytes of each image.
std::multiset<std::pair<int64_t, std::string>> images_of(const ddp::Dataset& dataset) {
  std::multiset<std::pair<int64_t, std::string>> images;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    const auto example = dataset.get(i);
    const auto data = example.data.contiguous();
    images.emplace(example.target.item<int64_t>(),
                   std::string(static_cast<const char*>(data.const_data_ptr()), data.nbytes()));
  }
  return images;
}

}  // namespace

TEST_CASE("the documented command makes shards that equal their folders", "[tar]") {
  const data_test::TempFolder folder;
  run(folder.path(), "mkdir -p images/train shards\ncd images/train\ntar -xf '" +
                         data_test::kSample +
                         "/test-000.tar'\nmkdir 'a class'\ncp ship/*8.jpg 'a class'\n");
  run(folder.path(), documented_command());

  ddp::DataOptions options{.augment = ddp::Augment::None};
  options.path = (folder.path() / "images").string();
  const auto expected = ddp::make_dataset(options);
  options.path = (folder.path() / "shards").string();
  const auto shards = ddp::make_dataset(options);

  REQUIRE(shards->class_names() == expected->class_names());
  REQUIRE(shards->size() == expected->size());
  REQUIRE(images_of(*shards) == images_of(*expected));
  // The command shuffles: the first images have several classes.
  std::set<int64_t> classes;
  for (int64_t i = 0; i < 20; ++i) {
    classes.insert(shards->get(i).target.item<int64_t>());
  }
  REQUIRE(classes.size() > 5);
}
