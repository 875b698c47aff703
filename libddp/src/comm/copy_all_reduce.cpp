// SPDX-License-Identifier: Apache-2.0
#include "comm/copy_all_reduce.hpp"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "comm/cuda_check.hpp"
#include "core/exit_actions.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

using ops::detail::Element;

namespace {

size_t round_up(size_t bytes) {
  return (bytes + CopyAllReduce::kAlignment - 1) / CopyAllReduce::kAlignment *
         CopyAllReduce::kAlignment;
}

CUstreamBatchMemOpParams write_flag(CUdeviceptr address, cuuint32_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = address;
  operation.writeValue.value = value;
  return operation;
}

CUstreamBatchMemOpParams wait_for_flag(CUdeviceptr address) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = address;
  operation.waitValue.value = 1;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return operation;
}

void copy(void* to, const void* from, size_t num_bytes, cudaStream_t stream) {
  if (num_bytes == 0) {  // the tensor ends before this rank's part
    return;
  }
  check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream),
             "cudaMemcpyAsync to another GPU");
}

// Sets the flags to 1 in a thread until the process ends: a wait resets its flag, and others may
// follow.
void keep_setting(void* flags, size_t num_bytes, int device) {
  const auto is_exiting = std::make_shared<std::atomic<bool>>(false);
  std::packaged_task<void()> set_flags([is_exiting, device, flags, num_bytes] {
    cudaSetDevice(device);
    int lowest = 0;
    int highest = 0;
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    cudaStream_t stream = nullptr;
    auto code = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest);
    const std::vector<uint32_t> ones(num_bytes / sizeof(uint32_t), 1);
    while (code == cudaSuccess && !*is_exiting) {
      code = cudaMemcpyAsync(flags, ones.data(), num_bytes, cudaMemcpyHostToDevice, stream);
      code = code == cudaSuccess ? cudaStreamSynchronize(stream) : code;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const auto ended = std::make_shared<std::future<void>>(set_flags.get_future());
  std::thread(std::move(set_flags)).detach();
  at_exit([is_exiting, ended](int /*status*/) {  // CUDA ends later
    *is_exiting = true;
    ended->wait_for(std::chrono::milliseconds(100));
  });
}

}  // namespace

size_t CopyAllReduce::flags_bytes(int world_size) {
  return 2 * static_cast<size_t>(world_size) * sizeof(uint32_t);
}

CopyAllReduce::CopyAllReduce(int rank, PeerAddresses slots, PeerAddresses flags)
    : rank_(rank),
      slots_(std::move(slots)),
      flags_(std::move(flags)),
      slot_bytes_(kSlotsBytes / slots_.size() / kAlignment * kAlignment),
      batch_mem_op_(find_driver_function("cuStreamBatchMemOp")) {
  // A kernel is loaded by its first launch, which may wait for the whole device or fail in a
  // capture.
  for (const auto element : {Element::Float32, Element::Bfloat16, Element::Float16}) {
    check_cuda(launch_part_sum({}, element, nullptr), "the sum of a part");
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
}

// A rank resets its flags before it goes on to the other meeting, and another rank sets them again
// only after that one. So two meetings that take turns never see each other's flags.
void CopyAllReduce::meet(Meeting meeting, cudaStream_t stream) const {
  const auto flag = [&](size_t at_rank, size_t of_rank) {
    const auto index = static_cast<size_t>(meeting) * slots_.size() + of_rank;
    return reinterpret_cast<CUdeviceptr>(flags_[at_rank]) + index * sizeof(uint32_t);
  };
  const auto own = static_cast<size_t>(rank_);
  std::vector<CUstreamBatchMemOpParams> operations;
  for (int step = 1; step < world_size(); ++step) {
    operations.push_back(write_flag(flag(peer(step), own), 1));
  }
  for (int step = 1; step < world_size(); ++step) {
    operations.push_back(wait_for_flag(flag(own, peer(step))));
    operations.push_back(write_flag(flag(own, peer(step)), 0));
  }
  const auto call =
      reinterpret_cast<CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned)>(
          batch_mem_op_);
  const auto code = call(stream, static_cast<unsigned>(operations.size()), operations.data(), 0);
  if (code != CUDA_SUCCESS) [[unlikely]] {
    throw Error(ExitCode::UserException,
                concat("cuStreamBatchMemOp failed with code ", static_cast<int>(code)));
  }
}

void CopyAllReduce::release() const noexcept {
  try {
    keep_setting(flags_[static_cast<size_t>(rank_)], flags_bytes(world_size()), device_);
  } catch (const std::exception& error) {
    log_error(concat("copies may wait after an abort: ", error.what()));
  }
}

// The slots are free: a rank's "complete" follows its sum of the turn before.
void CopyAllReduce::reduce_ranges(const PeerAddresses& data, const std::vector<Range>& ranges,
                                  Element element, float factor, cudaStream_t stream) const {
  const auto rank = static_cast<size_t>(rank_);
  char* const own = data[rank];
  for (int step = 1; step < world_size(); ++step) {
    const auto& range = ranges[peer(step)];
    copy(slots_[peer(step)] + rank * slot_bytes_, own + range.begin, range.size(), stream);
  }
  meet(Meeting::Pushed, stream);
  const auto& part = ranges[rank];
  check_cuda(launch_part_sum({.own = own + part.begin,
                              .slots = slots_[rank],
                              .slot_bytes = slot_bytes_,
                              .num_bytes = part.size(),
                              .rank = rank_,
                              .world_size = world_size(),
                              .factor = factor},
                             element, stream),
             "the sum of a part");
  for (int step = 1; step < world_size(); ++step) {
    copy(data[peer(step)] + part.begin, own + part.begin, part.size(), stream);
  }
  meet(Meeting::Complete, stream);
}

void CopyAllReduce::run(const PeerAddresses& data, size_t num_bytes, Element element, bool is_mean,
                        cudaStream_t stream) const {
  const size_t part = round_up((num_bytes + slots_.size() - 1) / slots_.size());
  const float factor = is_mean ? 1.0F / static_cast<float>(world_size()) : 1.0F;
  std::vector<Range> ranges(slots_.size());
  for (size_t done = 0; done < part; done += slot_bytes_) {
    for (size_t r = 0; r < ranges.size(); ++r) {
      ranges[r].begin = std::min(r * part + done, num_bytes);
      ranges[r].end = std::min(r * part + std::min(done + slot_bytes_, part), num_bytes);
    }
    reduce_ranges(data, ranges, element, factor, stream);
  }
}

}  // namespace ddp::detail
