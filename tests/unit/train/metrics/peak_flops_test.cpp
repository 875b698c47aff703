// SPDX-License-Identifier: Apache-2.0
// Peaks of GPUs by their names.
#include "train/metrics/ranks/peak_flops.hpp"

#include "support/catch.hpp"

using ddp::detail::FactorType;
using ddp::detail::peak_tflops;

TEST_CASE("GPUs have the peaks of their data sheets, by the names that NVML gives") {
  CHECK(peak_tflops("NVIDIA H200", FactorType::Half) == 989.4);
  CHECK(peak_tflops("NVIDIA H200", FactorType::Fp8) == 1978.9);
  CHECK(peak_tflops("NVIDIA H100 80GB HBM3", FactorType::Tf32) == 494.7);
  CHECK(peak_tflops("NVIDIA H100 PCIe", FactorType::Half) == 756);
  CHECK(peak_tflops("NVIDIA A100-SXM4-80GB", FactorType::Half) == 312);
  CHECK(peak_tflops("NVIDIA A100 80GB PCIe", FactorType::Float32) == 19.5);
  CHECK(peak_tflops("NVIDIA A10", FactorType::Half) == 125);
  CHECK(peak_tflops("NVIDIA L40S", FactorType::Half) == 362);
  CHECK(peak_tflops("NVIDIA L40", FactorType::Half) == 181);
  CHECK(peak_tflops("NVIDIA L4", FactorType::Half) == 121);
  CHECK(peak_tflops("Tesla V100-SXM2-16GB", FactorType::Half) == 125);
  CHECK(peak_tflops("NVIDIA RTX 6000 Ada Generation", FactorType::Half) == 364.2);
  CHECK(peak_tflops("NVIDIA GH200 144G HBM3e", FactorType::BFloat16) == 989.4);
  CHECK(peak_tflops("NVIDIA H800 PCIe", FactorType::Half) == 756);
  CHECK(peak_tflops("Tesla V100-PCIE-32GB", FactorType::Half) == 112);
  CHECK(peak_tflops("NVIDIA GeForce RTX 3090 Ti", FactorType::Half) == 80);
  CHECK(peak_tflops("NVIDIA GeForce RTX 4090", FactorType::Fp8) == 330.3);
}

TEST_CASE("what the table lacks has no peak") {
  CHECK(!peak_tflops("NVIDIA A100-SXM4-80GB", FactorType::Fp8));
  CHECK(!peak_tflops("Tesla V100-SXM2-16GB", FactorType::Tf32));
  CHECK(!peak_tflops("NVIDIA H2000", FactorType::Half));
  CHECK(!peak_tflops("", FactorType::Half));
  CHECK(!peak_tflops("Tesla V100-SXM2-16GB", FactorType::BFloat16));
  CHECK(!peak_tflops("Tesla T4", FactorType::BFloat16));
}

TEST_CASE("a name with other words is another GPU") {
  for (const char* name :
       {"NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM3-32GB",
        "NVIDIA A100-SXM-64GB", "GRID A100-10C", "NVIDIA A40-48Q", "NVIDIA A100-SXM4-40GB MIG",
        "NVIDIA A10G", "Tesla V100S-PCIE-32GB"}) {
    INFO(name);
    CHECK(!peak_tflops(name, FactorType::Half));
  }
}
