// SPDX-License-Identifier: Apache-2.0
#include "reduce/replica_sync.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <map>
#include <utility>

namespace ddp::detail {
namespace {

struct Chunk {
  std::vector<at::Tensor> tensors;
  int64_t bytes = 0;
};

// Same on all ranks: tensors come in the same order and have the same sizes.
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

at::Tensor to_bytes(const std::string& text, int64_t length) {
  auto bytes = at::zeros({length}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
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

std::vector<std::string> all_gather_text(Communicator& communicator, const std::string& text) {
  const int64_t world_size = communicator.world_size();
  const auto device = communicator.device();
  auto length = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  auto lengths = at::empty({world_size}, length.options());
  communicator.all_gather(lengths, length)->wait();
  lengths = lengths.cpu();
  const int64_t longest = std::max<int64_t>(1, lengths.max().item<int64_t>());
  auto mine = to_bytes(text, longest).to(device);
  auto all = at::empty({world_size * longest}, mine.options());
  communicator.all_gather(all, mine)->wait();
  all = all.cpu();
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    texts.emplace_back(static_cast<const char*>(all.data_ptr()) + rank * longest,
                       static_cast<size_t>(lengths[rank].item<int64_t>()));
  }
  return texts;
}

std::string broadcast_text(Communicator& communicator, const std::string& text, int root) {
  const auto device = communicator.device();
  auto length = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  communicator.broadcast(length, root)->wait();
  const auto size = length.cpu().item<int64_t>();
  if (size == 0) {
    return "";
  }
  auto bytes = (communicator.rank() == root ? to_bytes(text, size) : at::zeros({size}, at::kByte))
                   .to(device);
  communicator.broadcast(bytes, root)->wait();
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(size)};
}

}  // namespace ddp::detail
