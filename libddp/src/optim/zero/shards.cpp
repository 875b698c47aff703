// SPDX-License-Identifier: Apache-2.0
#include "optim/zero/shards.hpp"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "ddp/detail/check.hpp"

namespace ddp::detail {
namespace {

// Elements of a bucket: those of one parameter in this rank's part. None if numel is negative.
struct Overlap {
  int64_t first;
  int64_t numel;
};

Overlap overlap(int64_t offset, int64_t numel, int64_t part, int rank) {
  const int64_t first = std::max(offset, part * rank);
  return {first, std::min(offset + numel, part * (rank + 1)) - first};
}

}  // namespace

at::Tensor flat_memory(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  return parameter.detach().as_strided({parameter.numel()}, {1}, parameter.storage_offset());
}

std::vector<at::Tensor> own_gradients(const GradientArena& gradients,
                                      const Communicator& communicator) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  for (size_t b = 0; b < gradients.layout().buckets.size(); ++b) {
    const Bucket& bucket = gradients.layout().buckets[b];
    const at::Tensor& buffer = gradients.bucket(static_cast<int>(b)).buffer;
    const int64_t part = gradients.bucket_shard(static_cast<int>(b)).numel();
    const at::Tensor none = buffer.narrow(0, 0, 0);
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const auto parameter = static_cast<size_t>(bucket.parameters[i]);
      if (gradients.parameters()[parameter].tensor.grad().defined()) {
        const auto [first, numel] = overlap(bucket.offsets[i], gradients.specs()[parameter].numel,
                                            part, communicator.rank());
        own.push_back(numel > 0 ? buffer.narrow(0, first, numel) : none);
      }
    }
  }
  return own;
}

std::vector<ZeroBucket> shard_buckets(const GradientArena& gradients,
                                      const Communicator& communicator) {
  const at::NoGradGuard no_grad;
  const BucketLayout& layout = gradients.layout();
  std::vector<ZeroBucket> cut;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    const Bucket& bucket = layout.buckets[b];
    ZeroBucket& next = cut.emplace_back();
    next.label = make_label("weights of " + *gradients.bucket(static_cast<int>(b)).label);
    next.buffer = gradients.bucket(static_cast<int>(b)).buffer;
    next.shard = gradients.bucket_shard(static_cast<int>(b));
    const int64_t part = next.shard.numel();
    const int64_t begin = part * communicator.rank();
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const auto parameter = static_cast<size_t>(bucket.parameters[i]);
      const at::Tensor leaf = flat_memory(gradients.parameters()[parameter].tensor);
      const int64_t offset = bucket.offsets[i];
      next.parameters.push_back(parameter);
      next.offsets.push_back(offset);
      next.leaves.push_back(leaf);
      const auto [first, numel] = overlap(offset, leaf.numel(), part, communicator.rank());
      if (numel > 0 || (numel == 0 && leaf.numel() == 0)) {  // an empty parameter has state too
        next.pieces.push_back({.parameter = parameter,
                               .begin = first - offset,
                               .offset = first - begin,
                               .leaf = leaf.narrow(0, first - offset, numel),
                               .gradient = next.buffer.narrow(0, first, numel)});
      }
    }
    const auto dtype = next.leaves.front().scalar_type();
    DDP_CHECK(static_cast<int64_t>(c10::elementSize(dtype)) <= next.buffer.element_size(),
              "gradients are of fewer bits than their parameters");
    next.weights = next.buffer.view(dtype).narrow(0, 0, bucket.numel);
    next.weights_shard = next.weights.narrow(0, begin, part);
  }
  return cut;
}

}  // namespace ddp::detail
