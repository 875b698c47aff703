// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/tensor_hash.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/shared/tensor_hash_kernels.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops {
namespace detail {
namespace {

uint64_t hash_on_host(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
  const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
  uint64_t hash = 0;
  int64_t index = 0;
  for (; index < num_bytes / 8; ++index) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + index * 8, sizeof word);
    hash += hash_word(word, static_cast<uint64_t>(index));
  }
  return index * 8 < num_bytes
             ? hash + hash_word(read_word(bytes, num_bytes, index), static_cast<uint64_t>(index))
             : hash;
}

at::Tensor hash_all_on_host(const std::vector<at::Tensor>& tensors) {
  at::Tensor hashes = at::empty({std::ssize(tensors)}, at::kLong);
  for (size_t i = 0; i < tensors.size(); ++i) {
    hashes.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(hash_on_host(tensors[i].cpu()));
  }
  return hashes;
}

#ifdef DDP_HAS_CUDA
at::Tensor hash_all_by_kernel(const std::vector<at::Tensor>& tensors, at::Device device) {
  const at::Tensor hashes =
      at::zeros({std::ssize(tensors)}, at::TensorOptions().dtype(at::kLong).device(device));
  const c10::cuda::CUDAGuard guard(device);
  for (size_t first = 0; first < tensors.size(); first += kMaxHashedTensors) {
    HashedTensors table;
    int64_t num_chunks = 0;
    for (size_t i = first; i < std::min(first + kMaxHashedTensors, tensors.size()); ++i) {
      const auto num_bytes = static_cast<int64_t>(tensors[i].nbytes());
      table.bytes[table.count] = static_cast<const uint8_t*>(tensors[i].const_data_ptr());
      table.num_bytes[table.count] = num_bytes;
      table.first_chunk[table.count] = static_cast<int32_t>(num_chunks);
      table.count += 1;
      num_chunks += (num_bytes + 8 * kHashChunkWords - 1) / (8 * kHashChunkWords);
    }
    TORCH_CHECK(num_chunks < std::numeric_limits<int32_t>::max(), "hash_tensors: too much memory");
    table.first_chunk[table.count] = static_cast<int32_t>(num_chunks);
    C10_CUDA_CHECK(
        launch_hash(table, hashes.mutable_data_ptr<int64_t>() + first, stream_of(hashes)));
  }
  return hashes;
}
#endif

}  // namespace
}  // namespace detail

at::Tensor hash_tensors(const std::vector<at::Tensor>& tensors, at::Device device) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor here = tensor.detach().to(device);
    dense.push_back(here.is_non_overlapping_and_dense() ? here : here.contiguous());
  }
#ifdef DDP_HAS_CUDA
  if (!dense.empty() && detail::runs_own_code(dense.front())) {
    return detail::hash_all_by_kernel(dense, device);
  }
#endif
  return detail::hash_all_on_host(dense).to(device);
}

}  // namespace ddp::ops
