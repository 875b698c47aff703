// SPDX-License-Identifier: Apache-2.0
// The C++ side of python_interchange.py: writes or checks one file of formula tensors.
#include <torch/torch.h>

#include <cstring>
#include <iostream>

#include "ddp/core/safetensors.hpp"
#include "support/same_bits.hpp"

namespace {

ddp::TensorMap formula_tensors() {
  ddp::TensorMap tensors;
  const auto base = torch::arange(12).reshape({3, 4}).to(at::kFloat);
  const std::pair<const char*, at::ScalarType> dtypes[] = {{"uint8", at::kByte},
                                                           {"int8", at::kChar},
                                                           {"int16", at::kShort},
                                                           {"int32", at::kInt},
                                                           {"int64", at::kLong},
                                                           {"float16", at::kHalf},
                                                           {"bfloat16", at::kBFloat16},
                                                           {"float32", at::kFloat},
                                                           {"float64", at::kDouble},
                                                           {"uint16", at::kUInt16},
                                                           {"uint32", at::kUInt32},
                                                           {"uint64", at::kUInt64},
                                                           {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                           {"float8_e5m2", at::kFloat8_e5m2}};
  for (const auto& [name, dtype] : dtypes) {
    tensors[name] = base.to(dtype);
  }
  tensors["bool"] = torch::arange(5) % 2 == 0;
  tensors["scalar"] = torch::tensor(2.5f);
  tensors["empty"] = torch::empty({0, 3});
  return tensors;
}

int check(const ddp::Safetensors& file) {
  const auto expected = formula_tensors();
  bool good = file.tensors.size() == expected.size() && file.metadata.at("note") == "from python";
  for (const auto& [name, tensor] : expected) {
    const bool same = testing::same_bits(file.tensors.at(name), tensor);
    if (!same) {
      std::cerr << name << " differs\n";
    }
    good = good && same;
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: interchange_tool write|check FILE\n";
    return 64;
  }
  if (std::strcmp(argv[1], "write") == 0) {
    ddp::save_safetensors(argv[2], formula_tensors(), {{"format", "pt"}});
    return 0;
  }
  return check(ddp::load_safetensors(argv[2]));
}
