// SPDX-License-Identifier: Apache-2.0
#include "core/log/trace_recorder.hpp"
#include "ddp/detail/trace_scope.hpp"

#include <algorithm>

namespace ddp {
namespace {

std::atomic<uint64_t (*)(const char*)> range_start{nullptr};
std::atomic<void (*)(uint64_t)> range_end{nullptr};

}  // namespace

std::atomic<TraceRecorder*> TraceRecorder::active_{nullptr};

TraceRecorder::TraceRecorder(std::size_t max_events) : max_events_(max_events) {}

TraceRecorder::~TraceRecorder() {
  stop();
}

void TraceRecorder::start() {
  active_.store(this, std::memory_order_release);
}

void TraceRecorder::stop() {
  TraceRecorder* expected = this;
  active_.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel);
}

void TraceRecorder::set_device(std::shared_ptr<TraceDevice> device) {
  std::lock_guard lock(mutex_);
  device_ = std::move(device);
}

// Called with the mutex held.
bool TraceRecorder::reserve_place() {
  if (events_.size() + marked_.size() < max_events_) {
    return true;
  }
  dropped_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

void TraceRecorder::add(std::string_view name, std::string_view track, int64_t begin_ns,
                        int64_t end_ns) {
  const int64_t step = step_.load(std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  if (reserve_place()) {
    events_.push_back({std::string(name), std::string(track), begin_ns, end_ns, step});
  }
}

uint64_t TraceRecorder::mark(void* stream) {
  std::shared_ptr<TraceDevice> device;
  {
    std::lock_guard lock(mutex_);
    device = device_;
  }
  return device ? device->mark(stream) : 0;
}

void TraceRecorder::add_marked(std::string_view name, std::string_view track, uint64_t begin,
                               uint64_t end) {
  if (begin == 0 || end == 0) {
    return;
  }
  const int64_t step = step_.load(std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  if (reserve_place()) {
    marked_.push_back({{std::string(name), std::string(track), 0, 0, step}, begin, end});
  }
}

std::vector<TraceEvent> TraceRecorder::take() {
  std::vector<TraceEvent> events;
  std::vector<MarkedSpan> marked;
  std::shared_ptr<TraceDevice> device;
  {
    std::lock_guard lock(mutex_);
    events.swap(events_);
    marked.swap(marked_);
    device = device_;
  }
  // Waits for the device without the lock, so other threads keep recording.
  for (auto& span : marked) {
    span.event.begin_ns = device->resolve_ns(span.begin);
    span.event.end_ns = device->resolve_ns(span.end);
    events.push_back(std::move(span.event));
  }
  std::stable_sort(events.begin(), events.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return a.begin_ns < b.begin_ns;
  });
  return events;
}

void set_range_hooks(const RangeHooks& hooks) {
  range_end.store(hooks.end, std::memory_order_release);
  range_start.store(hooks.start, std::memory_order_release);
}

// A trace must never end a training run: an exception here only loses the span.
void TraceSpan::begin(const char* name, const char* track, Clock clock) noexcept {
  if (name_ != nullptr) {
    return;
  }
  const auto start = range_start.load(std::memory_order_relaxed);
  recorder_ = TraceRecorder::active();
  if (start == nullptr && recorder_ == nullptr) {
    return;
  }
  name_ = name;
  track_ = track;
  range_ = start != nullptr ? start(name) : 0;
  if (recorder_ != nullptr) {
    try {
      begin_mark_ = clock == Clock::Host ? 0 : recorder_->mark();
    } catch (...) {
      begin_mark_ = 0;
    }
    begin_ns_ = TraceRecorder::now_ns();
  }
}

void TraceSpan::end() noexcept {
  if (name_ == nullptr) {
    return;
  }
  // A stopped recorder has already returned its spans and may be destroyed.
  if (recorder_ != nullptr && recorder_ == TraceRecorder::active()) {
    try {
      recorder_->add(name_, track_, begin_ns_, TraceRecorder::now_ns());
      if (begin_mark_ != 0) {
        recorder_->add_marked(name_, std::string(track_) + " (device)", begin_mark_,
                              recorder_->mark());
      }
    } catch (...) {
      recorder_ = nullptr;
    }
  }
  const auto end = range_end.load(std::memory_order_relaxed);
  if (range_ != 0 && end != nullptr) {
    end(range_);
  }
  *this = {};
}

TraceScope::TraceScope(const char* name, const char* track, TraceSpan::Clock clock) {
  span_.begin(name, track, clock);
}

TraceScope::~TraceScope() {
  span_.end();
}

}  // namespace ddp
