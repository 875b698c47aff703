// SPDX-License-Identifier: Apache-2.0
#include "data/device_copy.hpp"

#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"

#ifdef DDP_HAS_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <utility>
#endif

namespace ddp::detail {

#ifdef DDP_HAS_CUDA
namespace {

//   copy stream     ── copy k+1 ──● event            copy k+2 ──● event
//   current stream     step k     └─ wait ─ step k+1            └─ wait ─ step k+2
//
// Device memory comes from the copy stream's pool. record_stream prevents a later copy from reusing
// a block before the step that reads the block has ended.
class CudaCopier : public DeviceCopier {
 public:
  explicit CudaCopier(at::Device device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  void start(const std::vector<at::Tensor*>& tensors) override {
    start([&] {
      for (at::Tensor* tensor : tensors) {
        if (tensor->defined() && tensor->is_cpu()) {
          at::Tensor target =
              at::empty_like(*tensor, tensor->options().device(device_).pinned_memory(false));
          target.copy_(*tensor, /*non_blocking=*/true);
          // Page-locked buffers belong to the loader's slots. Other buffers may be freed here: a
          // copy from pageable memory has finished reading when it returns.
          *tensor = std::move(target);
        }
      }
    });
  }

  void start(const std::function<void()>& work) override {
    c10::cuda::CUDAStreamGuard guard(stream_);
    try {
      work();
    } catch (...) {  // out of memory: the copies started so far still read host memory
      stream_.synchronize();
      throw;
    }
    at::cuda::CUDAEvent event;
    event.record(stream_);
    unfinished_.push_back(std::make_shared<at::cuda::CUDAEvent>(std::move(event)));
    unjoined_.push_back(unfinished_.back());
  }

  void join(const std::vector<at::Tensor*>& tensors) override {
    DDP_CHECK(!unjoined_.empty());
    const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
    unjoined_.front()->block(current);
    unjoined_.pop_front();
    for (at::Tensor* tensor : tensors) {
      if (tensor->defined() && tensor->is_cuda()) {
        tensor->record_stream(current.unwrap());
      }
    }
  }

  int num_unfinished() const override { return static_cast<int>(unfinished_.size()); }
  bool oldest_finished() override { return unfinished_.front()->query(); }
  void finish_oldest() override {
    unfinished_.front()->synchronize();
    unfinished_.pop_front();
  }
  void reset() override {
    while (!unfinished_.empty()) {
      finish_oldest();
    }
    unjoined_.clear();
  }

 private:
  at::Device device_;
  c10::cuda::CUDAStream stream_;
  std::deque<std::shared_ptr<at::cuda::CUDAEvent>> unfinished_;
  std::deque<std::shared_ptr<at::cuda::CUDAEvent>> unjoined_;
};

}  // namespace
#endif

std::unique_ptr<DeviceCopier> make_device_copier(at::Device device) {
  if (device.is_cpu()) {
    return nullptr;
  }
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    return std::make_unique<CudaCopier>(device);
  }
#endif
  throw SettingsError(concat("DataLoader: device ", device.str(), " is not one of this build's"));
}

}  // namespace ddp::detail
