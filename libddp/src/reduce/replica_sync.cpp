// SPDX-License-Identifier: Apache-2.0
#include "reduce/replica_sync.hpp"

#include <ATen/ATen.h>

#include <map>
#include <utility>

namespace ddp::detail {
namespace {

struct Chunk {
  std::vector<at::Tensor> tensors;
  int64_t bytes = 0;
};

// Equal on all ranks, because tensors have the same order and sizes.
std::vector<Chunk> pack(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes) {
  std::map<at::ScalarType, Chunk> open;
  std::vector<Chunk> chunks;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) {
      continue;
    }
    auto& chunk = open[tensor.scalar_type()];
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!chunk.tensors.empty() && chunk.bytes + bytes > chunk_bytes) {
      chunks.push_back(std::exchange(chunk, {}));
    }
    chunk.tensors.push_back(tensor);
    chunk.bytes += bytes;
  }
  for (auto& [dtype, chunk] : open) {
    if (!chunk.tensors.empty()) {
      chunks.push_back(std::move(chunk));
    }
  }
  return chunks;
}

std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    views.push_back(tensor.is_non_overlapping_and_dense()
                        ? flat.as_strided(tensor.sizes(), tensor.strides(), offset)
                        : flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
  return views;
}

}  // namespace

void broadcast_coalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                         int root, int64_t chunk_bytes) {
  if (communicator.world_size() == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (const auto& chunk : pack(tensors, chunk_bytes)) {
    if (chunk.tensors.size() == 1 && chunk.tensors[0].is_non_overlapping_and_dense()) {
      communicator.broadcast(chunk.tensors[0].detach(), root)->wait();
      continue;
    }
    int64_t numel = 0;
    for (const auto& tensor : chunk.tensors) {
      numel += tensor.numel();
    }
    auto flat = at::empty({numel}, chunk.tensors[0].options().requires_grad(false));
    auto views = views_of(flat, chunk.tensors);
    if (communicator.rank() == root) {
      at::_foreach_copy_(views, chunk.tensors);
    }
    communicator.broadcast(flat, root)->wait();
    if (communicator.rank() != root) {
      at::_foreach_copy_(chunk.tensors, views);
    }
  }
}

}  // namespace ddp::detail
