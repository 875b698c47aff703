// SPDX-License-Identifier: Apache-2.0
#include "ops/streams/side_streams.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "ops/shared/private_stream.hpp"
#include "ops/streams/stream_order.hpp"

namespace ddp::ops {
namespace {

thread_local SideStreams* innermost_scope = nullptr;

struct SideStream {
  explicit SideStream(const c10::Stream& main)
      : stream(detail::make_private_stream(main.device())) {}
  c10::Stream stream;
};

}  // namespace

SideTask::SideTask(const at::Tensor& input,
                   const std::function<at::Tensor(const at::Tensor&)>& make) {
  const auto side = SideStreams::side_stream(input.device());
  if (!side) {
    result_ = make(input);
    return;
  }
  const auto main = detail::current_stream(input.device());
  detail::wait_for(main, *side);
  {
    const c10::StreamGuard guard(*side);
    result_ = make(input);
  }
  // Each tensor is made on one stream and read on the other, also in the backward. The allocator
  // must not reuse its memory before the reader is done.
  input.record_stream(*side);
  result_.record_stream(main);
  done_.emplace(side->device_type());
  done_->record(*side);
}

at::Tensor SideTask::wait() {
  if (done_) {
    done_->block(detail::current_stream(result_.device()));
  }
  return result_;
}

SideStreams::SideStreams(bool enabled, int64_t max_held_bytes)
    : outer_(innermost_scope), enabled_(enabled), max_held_bytes_(max_held_bytes) {
  if (outer_ != nullptr) {
    enabled_ = enabled && outer_->enabled_;
    max_held_bytes_ = std::min(max_held_bytes, outer_->max_held_bytes_);
  }
  innermost_scope = this;
}

SideStreams::~SideStreams() {
  innermost_scope = outer_;
  if (!unjoined_) {
    return;
  }
  // The side stream may still read a weight whose matrix no convolution used, and must join a
  // capture.
  try {
    detail::wait_for(*unjoined_, detail::current_stream(unjoined_->device()));
  } catch (const std::exception& error) {  // the capture has already failed
    TORCH_WARN("a stream does not wait for its side stream: ", error.what());
  }
}

void SideStreams::start(c10::Device device, const std::function<void()>& work) {
  const auto side = side_stream(device);
  if (side) {
    detail::wait_for(detail::current_stream(device), *side);
    unjoined_ = side;
  }
  const c10::OptionalStreamGuard guard(side);
  work();
}

std::optional<c10::Stream> SideStreams::side_stream(c10::Device device) {
  if (innermost_scope == nullptr || !innermost_scope->enabled_ || !device.is_cuda()) {
    return std::nullopt;
  }
  return detail::per_stream<SideStream>(detail::current_stream(device)).stream;
}

int64_t SideStreams::held_bytes_limit() {
  return innermost_scope != nullptr && innermost_scope->enabled_ ? innermost_scope->max_held_bytes_
                                                                 : 0;
}

void SideStreams::prefetch(const at::Tensor& weight, int64_t stride, at::ScalarType dtype,
                           const std::function<at::Tensor(const at::Tensor&)>& make) {
  if (const auto side = side_stream(weight.device())) {
    innermost_scope->unjoined_ = side;
    innermost_scope->prefetched_.push_back({weight, stride, dtype, SideTask(weight, make)});
  }
}

at::Tensor SideStreams::find(const at::Tensor& weight, int64_t stride, at::ScalarType dtype) {
  for (auto* scope = innermost_scope; scope != nullptr; scope = scope->outer_) {
    for (auto& made : scope->prefetched_) {
      if (made.weight.is_same(weight) && made.stride == stride && made.dtype == dtype) {
        return made.matrix.wait();
      }
    }
  }
  return {};
}

}  // namespace ddp::ops
