// SPDX-License-Identifier: Apache-2.0
// Pictures and the results of torchvision's Resize and CenterCrop (tests/golden/eval).
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "ddp/data/dataset.hpp"
#include "unit/data/data_test_support.hpp"

namespace data_test {

struct EvalCase {
  std::string name;
  std::filesystem::path picture;
  int64_t resize = 0;
  int64_t size = 0;
  std::string expected;  ///< bytes, [size, size, 3]
};

inline std::vector<EvalCase> eval_cases() {
  namespace fs = std::filesystem;
  std::vector<EvalCase> cases;
  for (const auto& entry : fs::directory_iterator(DDP_SOURCE_DIR "/tests/golden/eval")) {
    if (entry.path().extension() != ".rgb") {
      continue;
    }
    // NAME.RESIZE.SIZE.rgb
    fs::path stem = entry.path().stem();
    const int64_t size = std::stoll(stem.extension().string().substr(1));
    stem = stem.stem();
    const int64_t resize = std::stoll(stem.extension().string().substr(1));
    const std::string name = stem.stem().string();
    fs::path picture = entry.path().parent_path() / (name + ".jpg");
    if (!fs::exists(picture)) {
      picture.replace_extension(".JPEG");
    }
    cases.push_back({name, picture, resize, size, read_file(entry.path())});
  }
  std::sort(cases.begin(), cases.end(), [](auto& a, auto& b) { return a.name < b.name; });
  return cases;
}

/// The test split of a folder with only this picture; pixels in 0..1.
inline ddp::DataOptions eval_options(const TempFolder& folder, const EvalCase& eval) {
  const auto place = folder.path() / "test" / "class" / eval.picture.filename();
  write_file(place, read_file(eval.picture));
  return {.path = folder.path(),
          .image_size = eval.size,
          .augment = ddp::Augment::None,
          .eval_resize = eval.resize,
          .mean = {0, 0, 0},
          .std = {1, 1, 1}};
}

/// Difference of an image [3, size, size] in 0..1 from torchvision's bytes.
struct Difference {
  double largest = 0;
  double mean = 0;
};
inline Difference difference_of(const at::Tensor& image, const EvalCase& eval) {
  const at::Tensor made = image.to(at::kCPU, at::kFloat).permute({1, 2, 0}).contiguous().flatten();
  const auto* values = made.const_data_ptr<float>();
  Difference found;
  for (size_t i = 0; i < eval.expected.size(); ++i) {
    const double expected = static_cast<uint8_t>(eval.expected[i]);
    const double error = std::abs(double(values[i]) * 255 - expected);
    found.largest = std::max(found.largest, error);
    found.mean += error / static_cast<double>(eval.expected.size());
  }
  return found;
}

}  // namespace data_test
