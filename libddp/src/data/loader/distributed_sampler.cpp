// SPDX-License-Identifier: Apache-2.0
#include "ddp/data/distributed_sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp {

namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t size, const CommunicatorPtr& communicator,
                                       const SamplerOptions& options)
    : DistributedSampler(
          size, communicator ? communicator->membership() : Membership{.rank = -1, .world_size = 0},
          options) {}

DistributedSampler::DistributedSampler(int64_t size, int rank, int world_size,
                                       const SamplerOptions& options)
    : DistributedSampler(size, Membership{.rank = rank, .world_size = world_size}, options) {}

DistributedSampler::DistributedSampler(int64_t size, Membership membership,
                                       const SamplerOptions& options)
    : size_(size), membership_(std::move(membership)), options_(options) {
  options.usage.set();
  if (world_size() < 1 || rank() < 0 || rank() >= world_size()) {
    throw SettingsError(concat("DistributedSampler: rank is ", rank(), " of world_size ",
                               world_size(), "; it must be in 0 .. world_size - 1"));
  }
  if (size < 0) {
    throw SettingsError(concat("DistributedSampler: size is ", size,
                               "; it is the number of samples in the data set, at least 0"));
  }
  set_epoch(0);
}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (epoch < 0) {
    throw SettingsError(concat("DistributedSampler: epoch is ", epoch, "; epochs count from 0"));
  }
  const bool known = epoch == epoch_ && static_cast<int64_t>(order_.size()) == size_;
  epoch_ = epoch;
  if (options_.shuffle && !known) {
    permute();
  }
  set_position(0);
}

void DistributedSampler::permute() {
  // Python's torch.Generator().manual_seed(seed + epoch) and torch.randperm(n, generator=g) make
  // the same two calls, so the bits agree.
  at::Generator generator =
      at::detail::createCPUGenerator(static_cast<uint64_t>(options_.seed + epoch_));
  const at::Tensor order = at::randperm(size_, generator, at::TensorOptions().dtype(at::kLong));
  const int64_t* data = order.const_data_ptr<int64_t>();
  order_.assign(data, data + size_);
}

int64_t DistributedSampler::end_place(int64_t first) const {
  const int64_t remaining = size_ - first;
  if (remaining <= 0) {
    return first;
  }
  if (options_.drop_last) {
    return first + remaining / world_size() * world_size();
  }
  return options_.pad ? first + ceil_div(remaining, world_size()) * world_size() : size_;
}

int64_t DistributedSampler::total_size() const {
  return end_place(0);
}

int64_t DistributedSampler::num_samples() const {
  const int64_t total = total_size();
  return total > rank() ? ceil_div(total - rank(), world_size()) : 0;
}

int64_t DistributedSampler::index_at(int64_t place) const {
  const int64_t wrapped = place % size_;
  return order_.empty() ? wrapped : order_[static_cast<size_t>(wrapped)];
}

std::vector<int64_t> DistributedSampler::indices() const {
  std::vector<int64_t> result;
  result.reserve(static_cast<size_t>(num_samples()));
  const int64_t end = total_size();
  for (int64_t place = rank(); place < end; place += world_size()) {
    result.push_back(index_at(place));
  }
  return result;
}

void DistributedSampler::set_position(int64_t position) {
  if (position < 0) {
    throw SettingsError(concat("DistributedSampler: position is ", position,
                               "; it counts samples from the start of the epoch"));
  }
  origin_ = position;
  taken_ = 0;
  begun_ = false;
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  const bool resized = new_size && static_cast<int64_t>(*new_size) != size_;
  if (resized) {
    size_ = static_cast<int64_t>(*new_size);
  }
  if (begun_ || resized) {
    set_epoch(begun_ ? epoch_ + 1 : epoch_);
  }
}

int64_t DistributedSampler::position() const {
  return std::min(origin_ + taken_ * world_size(), std::max(end_place(origin_), origin_));
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  begun_ = true;
  const int64_t end = end_place(origin_);
  std::vector<size_t> result;
  while (result.size() < batch_size) {
    const int64_t place = origin_ + taken_ * world_size() + rank();
    if (place >= end) {
      break;
    }
    result.push_back(static_cast<size_t>(index_at(place)));
    ++taken_;
  }
  if (result.empty()) {
    return std::nullopt;
  }
  return result;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", torch::tensor(epoch_, torch::kInt64), /*is_buffer=*/true);
  archive.write("position", torch::tensor(position(), torch::kInt64), /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  torch::Tensor epoch = torch::empty({}, torch::kInt64);
  torch::Tensor position = torch::empty({}, torch::kInt64);
  archive.read("epoch", epoch, /*is_buffer=*/true);
  archive.read("position", position, /*is_buffer=*/true);
  set_epoch(epoch.item<int64_t>());
  set_position(position.item<int64_t>());
}

}  // namespace ddp
