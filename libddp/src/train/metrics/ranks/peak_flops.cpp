// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/ranks/peak_flops.hpp"

namespace ddp::detail {
namespace {

// 0: the GPU has no such products.
struct Peak {
  const char* part;  ///< of the name
  double half, fp8, tf32, float32;
};

// The first row whose part is in the name counts, so longer parts precede shorter ones.
constexpr Peak kPeaks[] = {
    {"GB200", 2500, 5000, 1250, 80},
    {"B200", 2250, 4500, 1125, 75},
    {"GH200", 989.4, 1978.9, 494.7, 66.9},
    {"H200 NVL", 835.5, 1670.5, 417.5, 60},
    {"H200", 989.4, 1978.9, 494.7, 66.9},
    {"H100 PCIe", 756, 1513, 378, 51.2},
    {"H100 NVL", 835.5, 1670.5, 417.5, 60},
    {"H100", 989.4, 1978.9, 494.7, 66.9},
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
    {"V100", 112, 0, 0, 14},
    {"T4", 65, 0, 0, 8.1},
    {"RTX 6000 Ada", 364.2, 728.5, 182.1, 91.1},
    {"RTX A6000", 154.8, 0, 77.4, 38.7},
    {"RTX 4090", 165.2, 660.6, 82.6, 82.6},
    {"RTX 3090", 71, 0, 35.6, 35.6},
};

// "A10" is in "NVIDIA A10", not in "NVIDIA A100".
bool has_word(const std::string& name, const std::string& word) {
  const auto is_part = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  };
  for (auto at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
    const auto end = at + word.size();
    if ((at == 0 || !is_part(name[at - 1])) && (end == name.size() || !is_part(name[end]))) {
      return true;
    }
  }
  return false;
}

}  // namespace

const char* to_string(FactorType type) {
  constexpr const char* kNames[] = {"16 bit", "FP8", "TF32", "float32"};
  return kNames[static_cast<int>(type)];
}

std::optional<double> peak_tflops(const std::string& gpu_name, FactorType type) {
  for (const Peak& peak : kPeaks) {
    if (has_word(gpu_name, peak.part)) {
      const double tflops = type == FactorType::Half   ? peak.half
                            : type == FactorType::Fp8  ? peak.fp8
                            : type == FactorType::Tf32 ? peak.tf32
                                                       : peak.float32;
      return tflops > 0 ? std::optional(tflops) : std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace ddp::detail
