// SPDX-License-Identifier: Apache-2.0
// All copies form one contiguous layout, which is cut into chunks. Each chunk has one part per
// rank, each part consists of blocks. Threads read blocks of this rank's parts; two chunks are in
// flight.
//
//   threads          read block → page-locked slot ─┐  next block …
//   their streams               copy slot → chunk ──●─┐
//   current stream                    all-gather the chunk's parts ─ copy chunk → targets ─● free
//                                                       the chunk after next may be filled ┘
#include "pretrained/weight_stream.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "ddp/detail/check.hpp"
#include "pretrained/positioned_file.hpp"

namespace models::detail {
namespace {

constexpr uint64_t kAlignment = 256;  // for a tensor in a chunk and for a rank's part

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

using EventPtr = std::shared_ptr<c10::Event>;

EventPtr record_event(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

class WeightStream {
 public:
  WeightStream(const std::vector<std::string>& paths, const std::vector<WeightCopy>& copies,
               at::Device device, ddp::Communicator* communicator,
               const WeightStreamOptions& options)
      : copies_(copies), device_(device), communicator_(communicator), options_(options) {
    for (const auto& path : paths) {
      files_.emplace_back(path);
    }
    for (const auto& copy : copies) {
      DDP_CHECK(copy.target.is_contiguous() && copy.target.device() == device);
      positions_.push_back(total_);
      total_ += round_up(copy.num_bytes, kAlignment);
    }
    world_ = communicator == nullptr ? 1 : static_cast<uint64_t>(communicator->world_size());
    rank_ = communicator == nullptr ? 0 : static_cast<uint64_t>(communicator->rank());
    chunk_bytes_ =
        round_up(std::min(options.chunk_bytes, std::max<uint64_t>(total_, 1)), kAlignment * world_);
    block_bytes_ = round_up(options.block_bytes, kAlignment);
    blocks_of_chunk_ = (chunk_bytes_ / world_ + block_bytes_ - 1) / block_bytes_;
    chunks_.resize((total_ + chunk_bytes_ - 1) / chunk_bytes_);
  }

  ~WeightStream() { stop_threads(); }

  // Runs everything that may fail on one rank before the first collective.
  void prepare() {
    for (auto& buffer : buffers_) {
      buffer = at::empty({static_cast<int64_t>(chunk_bytes_)},
                         at::TensorOptions().dtype(at::kByte).device(device_));
    }
    if (device_.is_cuda()) {
      buffers_ready_ = record_event(current_stream());
    }
    for (int i = 0; i < options_.num_threads; ++i) {
      threads_.emplace_back([this] { read_blocks(); });
    }
  }

  void run() {
    for (uint64_t index = 0; index < chunks_.size(); ++index) {
      finish_chunk(index);
    }
    stop_threads();
    if (device_.is_cuda()) {
      record_event(current_stream())->synchronize();  // other streams may still use the buffers
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  struct Chunk {
    uint64_t num_issued = 0;         // blocks whose copy is enqueued
    std::vector<EventPtr> uploaded;  // CUDA: recorded after each of these copies
    EventPtr freed;                  // CUDA: its buffer may be overwritten
  };

  c10::Stream current_stream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }

  uint64_t chunk_size(uint64_t index) const {  // the last one is shorter
    return std::min(chunk_bytes_, round_up(total_ - index * chunk_bytes_, kAlignment * world_));
  }

  // Calls f(copy, begin, end) for each copy's overlap with [begin, end) of the layout.
  template <typename F>
  void for_each_overlap(uint64_t begin, uint64_t end, F&& f) const {
    const auto after = std::upper_bound(positions_.begin(), positions_.end(), begin);
    auto i = static_cast<std::size_t>(after - positions_.begin());
    i = i == 0 ? 0 : i - 1;
    for (; i < copies_.size() && positions_[i] < end; ++i) {
      const uint64_t from = std::max(begin, positions_[i]);
      const uint64_t to = std::min(end, positions_[i] + copies_[i].num_bytes);
      if (from < to) {
        f(copies_[i], positions_[i], from, to);
      }
    }
  }

  void read(uint64_t begin, uint64_t end, char* data) const {
    for_each_overlap(
        begin, end, [&](const WeightCopy& copy, uint64_t at, uint64_t from, uint64_t to) {
          files_[copy.file].read(copy.offset + (from - at), data + (from - begin), to - from);
        });
  }

  struct Slot {
    at::Tensor memory;
    EventPtr copied;
  };

  void read_blocks() {
    try {
      const c10::DeviceGuard device_guard(device_);
      Slot slots[2];
      std::optional<c10::Stream> stream;
      if (device_.is_cuda()) {
        stream = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
        buffers_ready_->block(*stream);
        for (auto& slot : slots) {
          slot.memory = at::empty({static_cast<int64_t>(block_bytes_)},
                                  at::TensorOptions().dtype(at::kByte).pinned_memory(true));
        }
      }
      for (uint64_t turn = 0;; ++turn) {
        const uint64_t block = next_block_++;
        if (block >= blocks_of_chunk_ * chunks_.size()) {
          break;
        }
        EventPtr uploaded =
            stream ? upload_block(block, slots[turn % 2], *stream) : copy_block(block);
        mark_issued(block / blocks_of_chunk_, std::move(uploaded));
      }
      for (const auto& slot : slots) {
        if (slot.copied) {
          slot.copied->synchronize();  // the slot's memory is freed with this thread
        }
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) {
        error_ = std::current_exception();
      }
      changed_.notify_all();
    }
  }

  // Range of a block in the layout, within this rank's part of the chunk; empty past the part's
  // end.
  std::pair<uint64_t, uint64_t> block_range(uint64_t block) const {
    const uint64_t chunk = block / blocks_of_chunk_;
    const uint64_t part = chunk_size(chunk) / world_;
    const uint64_t part_begin = chunk * chunk_bytes_ + rank_ * part;
    const uint64_t begin = std::min(part, block % blocks_of_chunk_ * block_bytes_);
    return {part_begin + begin, part_begin + std::min(part, begin + block_bytes_)};
  }

  at::Tensor block_memory(uint64_t chunk, uint64_t begin, uint64_t end) const {
    return buffers_[chunk % 2].narrow(0, static_cast<int64_t>(begin - chunk * chunk_bytes_),
                                      static_cast<int64_t>(end - begin));
  }

  EventPtr upload_block(uint64_t block, Slot& slot, const c10::Stream& stream) {
    const auto [begin, end] = block_range(block);
    const uint64_t chunk = block / blocks_of_chunk_;
    if (begin == end) {
      return nullptr;
    }
    if (slot.copied) {
      slot.copied->synchronize();
    }
    read(begin, end, static_cast<char*>(slot.memory.data_ptr()));
    if (const auto freed = wait_for_buffer(chunk)) {
      freed->block(stream);
    }
    const c10::StreamGuard stream_guard(stream);
    block_memory(chunk, begin, end)
        .copy_(slot.memory.narrow(0, 0, static_cast<int64_t>(end - begin)), /*non_blocking=*/true);
    slot.copied = record_event(stream);
    return slot.copied;
  }

  EventPtr copy_block(uint64_t block) {
    const auto [begin, end] = block_range(block);
    const uint64_t chunk = block / blocks_of_chunk_;
    (void)wait_for_buffer(chunk);
    if (begin < end) {
      read(begin, end, static_cast<char*>(block_memory(chunk, begin, end).data_ptr()));
    }
    return nullptr;
  }

  // A chunk reuses the buffer of the chunk two before it.
  EventPtr wait_for_buffer(uint64_t chunk) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return chunk < num_finished_ + 2 || stopped_; });
    return chunk < 2 ? nullptr : chunks_[chunk - 2].freed;
  }

  void mark_issued(uint64_t chunk, EventPtr uploaded) {
    const std::lock_guard lock(mutex_);
    if (uploaded) {
      chunks_[chunk].uploaded.push_back(std::move(uploaded));
    }
    if (++chunks_[chunk].num_issued == blocks_of_chunk_) {
      changed_.notify_all();
    }
  }

  // Runs on an error too, because the other ranks wait in this chunk's all-gather.
  void finish_chunk(uint64_t index) {
    std::vector<EventPtr> uploaded;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return chunks_[index].num_issued == blocks_of_chunk_ || error_; });
      uploaded = std::move(chunks_[index].uploaded);
    }
    for (const auto& event : uploaded) {
      event->block(current_stream());
    }
    const auto size = static_cast<int64_t>(chunk_size(index));
    const auto whole = buffers_[index % 2].narrow(0, 0, size);
    if (world_ > 1) {
      const int64_t part = size / static_cast<int64_t>(world_);
      communicator_->all_gather(whole, whole.narrow(0, static_cast<int64_t>(rank_) * part, part))
          ->wait();
    }
    copy_to_targets(index);
    EventPtr freed = device_.is_cuda() ? record_event(current_stream()) : nullptr;
    const std::lock_guard lock(mutex_);
    chunks_[index].freed = std::move(freed);
    num_finished_ = index + 1;
    changed_.notify_all();
  }

  void copy_to_targets(uint64_t index) {
    const uint64_t chunk_begin = index * chunk_bytes_;
    for_each_overlap(chunk_begin, chunk_begin + chunk_size(index),
                     [&](const WeightCopy& copy, uint64_t at, uint64_t from, uint64_t to) {
                       const auto bytes = block_memory(index, from, to);
                       const auto element_size = c10::elementSize(copy.dtype);
                       const auto first = static_cast<int64_t>((from - at) / element_size);
                       const auto count = static_cast<int64_t>((to - from) / element_size);
                       copy.target.view({-1}).narrow(0, first, count).copy_(bytes.view(copy.dtype));
                     });
  }

  void stop_threads() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      next_block_ = blocks_of_chunk_ * chunks_.size();
      changed_.notify_all();
    }
    for (auto& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }

  const std::vector<WeightCopy>& copies_;
  const at::Device device_;
  ddp::Communicator* const communicator_;
  const WeightStreamOptions options_;
  std::vector<PositionedFile> files_;
  std::vector<uint64_t> positions_;
  uint64_t total_ = 0;
  uint64_t world_ = 1;
  uint64_t rank_ = 0;
  uint64_t chunk_bytes_ = 0;
  uint64_t block_bytes_ = 0;
  uint64_t blocks_of_chunk_ = 0;
  at::Tensor buffers_[2];
  EventPtr buffers_ready_;

  std::atomic<uint64_t> next_block_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Chunk> chunks_;
  uint64_t num_finished_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace

void stream_weights(const std::vector<std::string>& files, const std::vector<WeightCopy>& copies,
                    at::Device device, ddp::Communicator* communicator,
                    const WeightStreamOptions& options,
                    const std::function<void(std::exception_ptr)>& agree) {
  const at::NoGradGuard no_grad;
  std::optional<WeightStream> stream;
  std::exception_ptr error;
  try {
    stream.emplace(files, copies, device, communicator, options);
    stream->prepare();
  } catch (...) {
    error = std::current_exception();
  }
  agree(error);
  stream->run();
}

}  // namespace models::detail
