// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/buffer_broadcast.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "comm/collective_label.hpp"
#include "ops/shared/autocast_off.hpp"
#include "ops/shared/private_stream.hpp"
#include "ops/shared/timing_event.hpp"

namespace ddp::detail {

using ops::detail::current_stream;
using ops::detail::wait_for;

// Packs by dtype in the buffers' order, which is equal on all ranks.
void BufferBroadcast::pack(const std::vector<at::Tensor>& buffers) {
  for (auto& part : parts_) {
    part.buffers.clear();
  }
  for (const auto& buffer : buffers) {
    if (buffer.numel() == 0) {
      continue;
    }
    auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& known) {
      return known.flat.scalar_type() == buffer.scalar_type();
    });
    if (part == parts_.end()) {
      part = parts_.insert(parts_.end(), Part{});
      part->flat = at::empty({0}, buffer.options());
    }
    // variable_data() has its own version counter, so autograd allows writes to buffers that it
    // saved for a backward.
    part->buffers.push_back(buffer.variable_data());
  }
  std::erase_if(parts_, [](const Part& part) { return part.buffers.empty(); });
  for (auto& part : parts_) {
    int64_t numel = 0;
    for (const auto& buffer : part.buffers) {
      numel += buffer.numel();
    }
    if (part.flat.numel() != numel) {
      part.flat = at::empty({numel}, part.flat.options().requires_grad(false));
    }
    part.views.clear();
    int64_t offset = 0;
    for (const auto& buffer : part.buffers) {
      part.views.push_back(part.flat.narrow(0, offset, buffer.numel()).view(buffer.sizes()));
      offset += buffer.numel();
    }
  }
}

void BufferBroadcast::start(const std::vector<at::Tensor>& buffers, int root) {
  finish();
  current_.is_sent = true;
  const at::NoGradGuard no_grad;
  const auto device = communicator_->device();
  const ops::AutocastOff autocast_off(device.type());
  pack(buffers);
  if (parts_.empty()) {
    return;
  }
  pending_ = true;
  root_ = root;
  std::optional<c10::StreamGuard> guard;
  if (!device.is_cpu()) {
    const auto current = current_stream(device);
    if (!stream_) {
      stream_ = ops::detail::make_private_stream(device, ops::detail::StreamPriority::Highest);
    }
    wait_for(current, *stream_);
    guard.emplace(*stream_);
  }
  for (auto& part : parts_) {
    if (communicator_->rank() == root) {
      at::_foreach_copy_(part.views, part.buffers);
    }
  }
  {
    static const auto label = make_label("buffers of the model");
    const LabelScope scope(label);
    const GroupScope group(*communicator_);
    for (auto& part : parts_) {
      part.work = communicator_->broadcast(part.flat, root);
    }
  }
  if (!device.is_cpu()) {
    write();
  }
}

void BufferBroadcast::write() {
  for (auto& part : parts_) {
    part.work->wait();
    part.work = nullptr;
    if (communicator_->rank() != root_) {
      at::_foreach_copy_(part.buffers, part.views);
    }
  }
}

void BufferBroadcast::finish() {
  if (!std::exchange(pending_, false)) {
    return;
  }
  if (stream_) {
    wait_for(*stream_, current_stream(communicator_->device()));
    return;
  }
  const at::NoGradGuard no_grad;
  write();
}

bool BufferBroadcast::take_sent() {
  finish();
  return std::exchange(current_.is_sent, false);
}

}  // namespace ddp::detail
