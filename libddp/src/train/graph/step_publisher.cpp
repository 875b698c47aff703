// SPDX-License-Identifier: Apache-2.0
#include "train/graph/step_publisher.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "comm/cuda_check.hpp"
#include "train/graph/step_kernels.hpp"

namespace ddp::detail {
namespace {

NumberType number_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return NumberType::Float;
    case at::kDouble:
      return NumberType::Double;
    case at::kHalf:
      return NumberType::Half;
    case at::kBFloat16:
      return NumberType::BFloat16;
    case at::kLong:
      return NumberType::Int64;
    case at::kInt:
      return NumberType::Int32;
    case at::kByte:
    case at::kBool:
      return NumberType::Byte;
    default:
      throw SettingsError(concat("GraphedStep: the step returns a one-element tensor of type ",
                                 c10::toString(tensor.scalar_type()),
                                 ", which cannot be logged; fix: convert it to float32, or do not "
                                 "return it"));
  }
}

}  // namespace

StepRing::Slots make_mapped_slots(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  constexpr size_t kBytes = StepRing::kNumSlots * sizeof(PublishedSlot);
  PublishedSlot* slots = nullptr;
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&slots), kBytes,
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc of the step's numbers");
  std::fill_n(slots, StepRing::kNumSlots, PublishedSlot{});
  return {slots, [](PublishedSlot* allocated) {
            cudaFreeHost(allocated);  // waits for the device; errors cannot be reported here
          }};
}

void publish(const std::vector<at::Tensor>& scalars, const StepFeed& feed, const StepRing& ring) {
  const auto device = feed.device();
  PublishArguments arguments{};
  for (const auto& scalar : scalars) {
    if (scalar.device() != device) {
      throw SettingsError(concat("GraphedStep: the step returns a number on ", scalar.device(),
                                 ", but runs on ", device, ": return it from the device"));
    }
    arguments.numbers[arguments.count] = scalar.const_data_ptr();
    arguments.types[arguments.count++] = number_type(scalar);
  }
  arguments.sequence = feed.sequence();
  arguments.slots = ring.slots();
  arguments.num_slots = StepRing::kNumSlots;
  check_cuda(launch_publish(arguments, c10::cuda::getCurrentCUDAStream(device.index()).stream()),
             "the kernel that publishes a step's numbers");
}

}  // namespace ddp::detail
