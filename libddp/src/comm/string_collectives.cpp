// SPDX-License-Identifier: Apache-2.0
#include "comm/string_collectives.hpp"

#include <ATen/ATen.h>

#include <algorithm>

namespace ddp::detail {
namespace {

at::Tensor to_bytes(const std::string& text, int64_t length) {
  auto bytes = at::zeros({length}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<uint8_t>());
  return bytes;
}

}  // namespace

std::vector<std::string> all_gather_string(Communicator& communicator, const std::string& text) {
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

std::string broadcast_string(Communicator& communicator, const std::string& text, int root) {
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
