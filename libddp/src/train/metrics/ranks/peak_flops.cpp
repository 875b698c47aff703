// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/peak_flops.hpp"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <sstream>
#include <vector>

namespace ddp::detail {
namespace {

// Sums in float32. 0: the GPU has no such products. bfloat16 came with TF32, as fast as float16.
struct Peak {
  const char* part;  ///< the name without maker, memory and form
  double half, fp8, tf32, float32;
};

// The first row that fits counts, so longer parts precede shorter ones.
constexpr Peak kPeaks[] = {
    {"GB200", 2500, 5000, 1250, 80},
    {"B200", 2250, 4500, 1125, 75},
    {"GH200", 989.4, 1978.9, 494.7, 66.9},
    {"H200 NVL", 835.5, 1670.5, 417.5, 60},
    {"H200", 989.4, 1978.9, 494.7, 66.9},
    {"H100 PCIe", 756, 1513, 378, 51.2},
    {"H100 NVL", 835.5, 1670.5, 417.5, 60},
    {"H100", 989.4, 1978.9, 494.7, 66.9},
    {"H800 PCIe", 756, 1513, 378, 51.2},
    {"H800", 989.4, 1978.9, 494.7, 66.9},
    {"H20", 148, 296, 74, 44},
    {"A100", 312, 0, 156, 19.5},
    {"A800", 312, 0, 156, 19.5},
    {"A30", 165, 0, 82, 10.3},
    {"A40", 149.7, 0, 74.8, 37.4},
    {"A10", 125, 0, 62.5, 31.2},
    {"L40S", 362, 733, 183, 91.6},
    {"L40", 181, 362, 90.5, 90.5},
    {"L4", 121, 242.5, 60, 30.3},
    {"V100-SXM2", 125, 0, 0, 15.7},
    {"V100-PCIE", 112, 0, 0, 14},
    {"T4", 65, 0, 0, 8.1},
    {"RTX 6000 Ada", 364.2, 728.5, 182.1, 91.1},
    {"RTX A6000", 154.8, 0, 77.4, 38.7},
    {"RTX 4090", 165.2, 330.3, 82.6, 82.6},
    {"RTX 3090 Ti", 80, 0, 40, 40},
    {"RTX 3090", 71, 0, 35.6, 35.6},
};

// "A100-SXM4-40GB" is "A100", "SXM4" and "40GB".
std::vector<std::string> words_of(std::string text) {
  std::replace(text.begin(), text.end(), '-', ' ');
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// "80GB", "144G".
bool is_memory(const std::string& word) {
  const auto digits = std::min(word.find_first_not_of("0123456789"), word.size());
  return digits > 0 && (word.substr(digits) == "GB" || word.substr(digits) == "G");
}

// Another word makes it another GPU: "Ti", "Laptop", "MIG", or "10C" of a virtual GPU.
bool is_same_gpu(const std::string& name, const std::string& part) {
  auto words = words_of(name);
  const auto wanted = words_of(part);
  const auto found = std::search(words.begin(), words.end(), wanted.begin(), wanted.end());
  if (found == words.end()) {
    return false;
  }
  const auto is_one_of = [](const std::string& word, std::initializer_list<const char*> list) {
    return std::find(list.begin(), list.end(), word) != list.end();
  };
  const auto is_maker = [&](const std::string& word) {
    return is_one_of(word, {"NVIDIA", "Tesla", "GeForce"});
  };
  const auto is_form = [&](const std::string& word) {
    return is_memory(word) ||
           is_one_of(word, {"SXM4", "SXM5", "PCIe", "PCIE", "HBM3", "HBM3e", "Generation"});
  };
  return std::all_of(words.begin(), found, is_maker) &&
         std::all_of(found + std::ssize(wanted), words.end(), is_form);
}

}  // namespace

const char* to_string(FactorType type) {
  constexpr const char* kNames[] = {"float16", "bfloat16", "FP8", "TF32", "float32"};
  return kNames[static_cast<int>(type)];
}

std::optional<double> peak_tflops(const std::string& gpu_name, FactorType type) {
  for (const Peak& peak : kPeaks) {
    if (is_same_gpu(gpu_name, peak.part)) {
      const double bfloat16 = peak.tf32 > 0 ? peak.half : 0;
      const double tflops = type == FactorType::Half       ? peak.half
                            : type == FactorType::BFloat16 ? bfloat16
                            : type == FactorType::Fp8      ? peak.fp8
                            : type == FactorType::Tf32     ? peak.tf32
                                                           : peak.float32;
      return tflops > 0 ? std::optional(tflops) : std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace ddp::detail
