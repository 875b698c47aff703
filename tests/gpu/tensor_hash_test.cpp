// SPDX-License-Identifier: Apache-2.0
// Hashes of tensors on a GPU are those of the host, for any size, alignment and memory order.
#include "ops/shared/tensor_hash.hpp"

#include <c10/cuda/CUDAFunctions.h>
#include <torch/torch.h>

#include <chrono>
#include <iostream>

#include "support/catch.hpp"

using ddp::ops::hash_tensors;

namespace {

const at::Device kGpu(at::kCUDA, 0);

at::Tensor random_bytes(int64_t size) {
  return torch::randint(0, 256, {size}, at::TensorOptions(at::kByte).device(kGpu));
}

void require_host_hashes(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> on_host;
  for (const auto& tensor : tensors) {
    on_host.push_back(tensor.cpu());
  }
  const auto hashes = hash_tensors(tensors, kGpu);
  REQUIRE(hashes.is_cuda());
  REQUIRE(torch::equal(hashes.cpu(), hash_tensors(on_host, at::kCPU)));
}

}  // namespace

TEST_CASE("tensors of all sizes and alignments have the host's hashes") {
  constexpr int64_t kChunk = 65536;
  std::vector<at::Tensor> all;
  for (const int64_t size :
       {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, int64_t{15}, int64_t{16}, int64_t{1000},
        kChunk - 1, kChunk, kChunk + 1, kChunk + 8, 3 * kChunk + 24, 40 * kChunk + 3}) {
    for (const int64_t offset : {0, 1, 4, 8}) {
      all.push_back(random_bytes(size + offset).narrow(0, offset, size));
    }
  }
  require_host_hashes(all);
}

TEST_CASE("hundreds of tensors, tensors with holes, and tensors of the host") {
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < 300; ++i) {
    all.push_back(torch::randn({i % 7 + 1, 33}, kGpu).to(i % 2 == 0 ? at::kFloat : at::kBFloat16));
  }
  all.push_back(torch::randn({2, 3, 5, 5}, kGpu).contiguous(at::MemoryFormat::ChannelsLast));
  all.push_back(torch::randn({6, 8}, kGpu).slice(1, 0, 8, 2));
  all.push_back(torch::tensor(3, at::kLong));
  require_host_hashes(all);
  CHECK(hash_tensors({}, kGpu).numel() == 0);
}

TEST_CASE("each bit is in the hash") {
  const auto tensor = random_bytes(65536 + 77);
  const auto before = hash_tensors({tensor}, kGpu).item<int64_t>();
  for (int64_t i = 0; i < 200; ++i) {
    const auto byte = tensor[(i * 7919) % tensor.numel()];
    byte.bitwise_xor_(1 << (i % 8));
    CHECK(hash_tensors({tensor}, kGpu).item<int64_t>() != before);
    byte.bitwise_xor_(1 << (i % 8));
  }
  CHECK(hash_tensors({tensor}, kGpu).item<int64_t>() == before);
}

// The parameters, masters and momenta of a ResNet-50: 161 tensors each, 77M numbers.
TEST_CASE("what the hashes of a ResNet-50's replica take", "[.][bench]") {
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < 3 * 161; ++i) {
    all.push_back(torch::randn({i % 3 == 0 ? 476'000 : 512}, kGpu));
  }
  for (int round = 0; round < 5; ++round) {
    c10::cuda::device_synchronize();
    const auto begin = std::chrono::steady_clock::now();
    const auto one = hash_tensors({hash_tensors(all, kGpu)}, kGpu).item<int64_t>();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    std::cout << "hash " << one << " in " << time.count() << " us, with the host's wait\n";
  }
}
