// SPDX-License-Identifier: Apache-2.0
// A bounded ring of batches that worker threads fill ahead of one consumer, in a fixed order. Does
// not use Torch, so the thread sanitizer can run it unchanged.
//
//   slot      open ──> filling (chunks claimed by workers) ──> ready ──> taken ──> open …
//   who       worker   workers                                 the last   consumer  consumer
//                                                              worker     acquire   release
//
// Order: slots are opened under the lock in ring order, and the consumer takes them in that order.
// So the batches have the order of `plan`, whatever the workers do. Workers claim chunks from the
// oldest slot that has any left, so the next batch gets the threads.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace ddp::detail {

struct RingOptions {
  int num_slots = 4;
  int num_workers = 2;  ///< 0: acquire() does the work on the calling thread
  int64_t chunk = 16;   ///< items a worker claims at once
};

template <typename Payload>
class PrefetchRing {
 public:
  struct Stages {
    /// Prepares the slot for the next batch and returns its number of items (> 0); nullopt at the
    /// end of the stream. Calls are in order and never overlap.
    std::function<std::optional<int64_t>(Payload&)> plan;
    /// Fills items [begin, end) of the batch. Called concurrently on disjoint ranges.
    std::function<void(Payload&, int64_t begin, int64_t end)> fill;
    /// Called once when all items are filled, by the thread that filled the last one.
    std::function<void(Payload&)> finish;
    /// Called once by each worker thread, before its other calls; may be empty.
    std::function<void()> start_worker = {};
  };

  PrefetchRing(const RingOptions& options, Stages stages)
      : options_(options),
        stages_(std::move(stages)),
        slots_(static_cast<size_t>(std::max(options.num_slots, 1))) {
    try {
      for (int i = 0; i < options_.num_workers; ++i) {
        threads_.emplace_back([this] {
          if (stages_.start_worker) {
            stages_.start_worker();
          }
          work();
        });
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  ~PrefetchRing() { stop(); }
  PrefetchRing(const PrefetchRing&) = delete;
  PrefetchRing& operator=(const PrefetchRing&) = delete;

  /// Waits for the oldest batch not yet taken; nullptr at the end of the stream. Rethrows an error
  /// of the batch: the first item's, so that the error does not depend on timing. Every later call
  /// throws the error again.
  Payload* acquire() {
    std::unique_lock lock(mutex_);
    while (true) {
      Slot& slot = slot_at(next_take_);
      if (slot.state == State::Ready) {
        if (slot.error) {
          std::rethrow_exception(slot.error);
        }
        slot.state = State::Taken;
        ++next_take_;
        return &slot.payload;
      }
      if (next_take_ == next_open_ && ended_) {
        return nullptr;
      }
      if (next_take_ == next_open_ && slot.state == State::Taken) {
        throw std::logic_error("PrefetchRing: all slots are taken; release one first");
      }
      if (options_.num_workers == 0) {
        work_once(lock);
      } else {
        ready_.wait(lock);
      }
    }
  }

  /// Whether acquire() would return or throw at once.
  bool ready() const {
    std::lock_guard lock(mutex_);
    return slots_[static_cast<size_t>(next_take_) % slots_.size()].state == State::Ready ||
           (ended_ && next_take_ == next_open_);
  }

  /// Returns the slot of the oldest taken batch to the workers.
  void release() {
    {
      std::lock_guard lock(mutex_);
      slot_at(next_release_).state = State::Free;
      ++next_release_;
    }
    work_available_.notify_all();
  }

  /// Ends each worker after its current chunk. Idempotent; acquire() must not be waiting.
  void stop() noexcept {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    work_available_.notify_all();
    for (auto& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }

 private:
  enum class State { Free, Filling, Ready, Taken };
  struct Slot {
    State state = State::Free;
    int64_t count = 0;
    int64_t claimed = 0;
    int64_t filled = 0;
    std::exception_ptr error;
    int64_t error_item = std::numeric_limits<int64_t>::max();
    Payload payload{};
  };
  struct Chunk {
    Slot* slot;
    int64_t begin;
    int64_t end;
  };

  Slot& slot_at(int64_t number) { return slots_[static_cast<size_t>(number) % slots_.size()]; }

  void work() {
    std::unique_lock lock(mutex_);
    while (!stopped_) {
      if (!work_once(lock)) {
        work_available_.wait(lock);
      }
    }
  }

  // Does one chunk of work; false if there is none now. The lock is held on entry and on return.
  bool work_once(std::unique_lock<std::mutex>& lock) {
    auto chunk = claim();
    if (!chunk) {
      chunk = open_next();
    }
    if (!chunk) {
      return false;
    }
    if (chunk->end < chunk->slot->count) {
      work_available_.notify_one();
    }
    lock.unlock();
    std::exception_ptr error;
    try {
      stages_.fill(chunk->slot->payload, chunk->begin, chunk->end);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    complete(*chunk, error, lock);
    return true;
  }

  std::optional<Chunk> claim() {
    for (int64_t number = next_take_; number < next_open_; ++number) {
      Slot& slot = slot_at(number);
      if (slot.state == State::Filling && slot.claimed < slot.count) {
        const int64_t begin = slot.claimed;
        slot.claimed = std::min(begin + std::max<int64_t>(options_.chunk, 1), slot.count);
        return Chunk{&slot, begin, slot.claimed};
      }
    }
    return std::nullopt;
  }

  std::optional<Chunk> open_next() {
    Slot& slot = slot_at(next_open_);
    if (ended_ || slot.state != State::Free) {
      return std::nullopt;
    }
    slot.error = nullptr;
    slot.error_item = std::numeric_limits<int64_t>::max();
    std::optional<int64_t> count;
    try {
      count = stages_.plan(slot.payload);
    } catch (...) {
      // The stream ends here: its last batch is an error.
      slot.error = std::current_exception();
      slot.state = State::Ready;
      ended_ = true;
      ++next_open_;
      ready_.notify_all();
      return std::nullopt;
    }
    if (!count) {
      ended_ = true;
      ready_.notify_all();
      return std::nullopt;
    }
    slot.count = *count;
    slot.claimed = slot.filled = 0;
    slot.state = State::Filling;
    ++next_open_;
    return claim();
  }

  void complete(const Chunk& chunk, const std::exception_ptr& error,
                std::unique_lock<std::mutex>& lock) {
    Slot& slot = *chunk.slot;
    if (error && chunk.begin < slot.error_item) {
      slot.error = error;
      slot.error_item = chunk.begin;
    }
    slot.filled += chunk.end - chunk.begin;
    if (slot.filled < slot.count) {
      return;
    }
    if (!slot.error) {
      lock.unlock();
      std::exception_ptr finish_error;
      try {
        stages_.finish(slot.payload);
      } catch (...) {
        finish_error = std::current_exception();
      }
      lock.lock();
      slot.error = finish_error;
    }
    slot.state = State::Ready;
    ready_.notify_all();
  }

  RingOptions options_;
  Stages stages_;
  mutable std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable ready_;
  std::vector<Slot> slots_;
  int64_t next_open_ = 0;     ///< number (from 0) of the next batch of plan()
  int64_t next_take_ = 0;     ///< the next for acquire()
  int64_t next_release_ = 0;  ///< the oldest taken
  bool ended_ = false;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ddp::detail
