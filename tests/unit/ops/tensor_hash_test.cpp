// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/tensor_hash.hpp"

#include <ATen/ATen.h>

#include <set>

#include "support/catch.hpp"

namespace {

int64_t hash_of(const at::Tensor& tensor) {
  return ddp::ops::hash_tensors({tensor}, at::kCPU).item<int64_t>();
}

at::Tensor bytes(int64_t size) {
  return at::arange(size, at::kLong).mul(37).remainder(251).to(at::kByte);
}

}  // namespace

TEST_CASE("each bit of a tensor of each length is in its hash") {
  for (const int64_t size : {1, 2, 7, 8, 9, 16, 23, 40}) {
    const auto tensor = bytes(size);
    std::set<int64_t> hashes{hash_of(tensor)};
    for (int64_t i = 0; i < size; ++i) {
      for (int bit = 0; bit < 8; ++bit) {
        tensor[i].bitwise_xor_(1 << bit);
        hashes.insert(hash_of(tensor));
        tensor[i].bitwise_xor_(1 << bit);
      }
    }
    CHECK(std::ssize(hashes) == 8 * size + 1);
  }
}

TEST_CASE("the order of elements is in the hash, their place in memory is not") {
  const auto tensor = bytes(64);
  CHECK(hash_of(tensor.flip({0})) != hash_of(tensor));
  CHECK(hash_of(tensor.roll(8)) != hash_of(tensor));
  for (int64_t offset = 1; offset < 9; ++offset) {
    const auto moved = at::zeros({80}, at::kByte).narrow(0, offset, 64).copy_(tensor);
    CHECK(hash_of(moved) == hash_of(tensor));
  }
  CHECK(hash_of(at::zeros({2})) != hash_of(at::zeros({4})));
  CHECK(hash_of(at::zeros({0})) == 0);
  CHECK(hash_of(at::zeros({})) != hash_of(-at::zeros({})));
}

TEST_CASE("hashes are of memory order, of any dtype, and in the order of the tensors") {
  const auto image = at::arange(2 * 3 * 4 * 4, at::kFloat).view({2, 3, 4, 4});
  const auto last = image.contiguous(at::MemoryFormat::ChannelsLast);
  CHECK(hash_of(last) == hash_of(last.permute({0, 2, 3, 1}).contiguous()));
  const auto holes = image.slice(3, 0, 4, 2);
  CHECK(hash_of(holes) == hash_of(holes.contiguous()));
  const auto all = ddp::ops::hash_tensors(
      {image, image.to(at::kBFloat16), image.to(at::kLong), at::ones({}, at::kBool)}, at::kCPU);
  CHECK(all[0].item<int64_t>() == hash_of(image));
  CHECK(all[1].item<int64_t>() == hash_of(image.to(at::kBFloat16)));
  CHECK(all[3].item<int64_t>() == hash_of(at::ones({1}, at::kByte)));
  CHECK(ddp::ops::hash_tensors({}, at::kCPU).numel() == 0);
}
