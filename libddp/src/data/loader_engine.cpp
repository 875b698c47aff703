// SPDX-License-Identifier: Apache-2.0
#include "ddp/detail/prefetch_source.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "core/trace_recorder.hpp"
#include "data/batch_plan.hpp"
#include "data/device_copy.hpp"
#include "data/prefetch_ring.hpp"
#include "data/sample_error.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/trace_scope.hpp"

namespace ddp::detail {

namespace {

// Samples that a worker claims at once: enough to hide the cost of the lock, few enough that the
// threads share a batch.
constexpr int64_t kChunk = 8;
// Batches held by the consumer: one being copied to the device, one read by the step.
constexpr int kHeld = 2;

struct RingPayload {
  int slot = -1;
  int64_t epoch = 0;
  std::vector<int64_t> indices;
};
using Ring = PrefetchRing<RingPayload>;

}  // namespace

void rethrow_with_sample(int64_t index, int64_t epoch) {
  const std::string where = concat(" (loading sample ", index, " of epoch ", epoch, ")");
  try {
    throw;
  } catch (const DataError& e) {
    throw DataError(e.what() + where);
  } catch (const SettingsError& e) {
    throw SettingsError(e.what() + where);
  } catch (const Error& e) {
    throw Error(e.exit_code(), e.what() + where);
  } catch (const std::exception& e) {
    std::throw_with_nested(Error(ExitCode::UserException, e.what() + where));
  }
}

struct LoaderEngine::State {
  State(const DistributedSampler& original, at::Device device, const LoaderOptions& opts,
        SlotFiller& slot_filler)
      : options(opts),
        filler(slot_filler),
        batches(original, opts),
        sampler(original),
        copier(make_device_copier(device)) {}

  // Called by the ring, one call at a time.
  std::optional<int64_t> plan(RingPayload& payload) {
    auto batch = plan_batch(sampler, planned.position, batches.global_size(), options.drop_last);
    if (!batch || batch->indices.empty()) {
      if (planned.position == 0) {
        return std::nullopt;  // an epoch without a batch: later epochs have none either
      }
      planned = {planned.epoch + 1, 0};
      sampler.set_epoch(planned.epoch);
      return plan(payload);
    }
    payload.slot = static_cast<int>(num_planned++ % num_slots(options));
    payload.epoch = planned.epoch;
    payload.indices = std::move(batch->indices);
    planned.position = batch->end;
    const bool last = batches.count_after(batch->end) == 0;
    {
      std::lock_guard lock(mutex);
      after.push_back(last ? LoaderPlace{planned.epoch + 1, 0} : planned);
    }
    const auto count = static_cast<int64_t>(payload.indices.size());
    filler.resize(payload.slot, count);
    return count;
  }

  void fill(RingPayload& payload, int64_t begin, int64_t end) {
    const TraceScope trace("load samples", "loader threads", TraceSpan::Clock::Host);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = payload.indices[static_cast<size_t>(i)];
      try {
        filler.fill(payload.slot, i, index, payload.epoch);
      } catch (...) {
        rethrow_with_sample(index, payload.epoch);
      }
    }
  }

  void start(LoaderPlace place) {
    ring.reset();  // joins the workers before their inputs change
    if (copier) {
      copier->reset();
    }
    if (sampler.epoch() != place.epoch) {
      sampler.set_epoch(place.epoch);
    }
    // The end of an epoch is stored as the start of the next.
    if (place.position > 0 && batches.count_after(place.position) == 0) {
      place = {place.epoch + 1, 0};
      sampler.set_epoch(place.epoch);
    }
    planned = consumed = place;
    num_planned = 0;
    after.clear();
    ring = std::make_unique<Ring>(
        RingOptions{.num_slots = num_slots(options),
                    .num_workers = static_cast<int>(options.num_workers),
                    .chunk = kChunk},
        Ring::Stages{.plan = [this](RingPayload& p) { return plan(p); },
                     .fill = [this](RingPayload& p, int64_t b, int64_t e) { fill(p, b, e); },
                     .finish = [this](RingPayload& p) { filler.finish(p.slot); }});
  }

  LoaderOptions options;
  SlotFiller& filler;
  EpochBatches batches;
  DistributedSampler sampler;  // used only by plan()
  std::unique_ptr<DeviceCopier> copier;
  LoaderPlace planned;
  LoaderPlace consumed;
  int64_t num_planned = 0;
  std::mutex mutex;
  std::deque<LoaderPlace> after;  // of each batch planned and not yet consumed
  std::chrono::nanoseconds waited{0};
  std::unique_ptr<Ring> ring;  // destroyed first
};

LoaderEngine::LoaderEngine(const DistributedSampler& sampler, at::Device device,
                           const LoaderOptions& options, SlotFiller& filler) {
  options.taken.set();
  state_ = std::make_unique<State>(sampler, device, options, filler);
  state_->start({sampler.epoch(), sampler.position()});
}

LoaderEngine::~LoaderEngine() {
  // Unfinished copies still read the slots' memory, which the builders free next.
  try {
    if (state_ && state_->copier) {
      state_->copier->reset();
    }
  } catch (...) {
  }
}

int LoaderEngine::num_slots(const LoaderOptions& options) {
  return static_cast<int>(std::max<int64_t>(options.prefetch_batches, 1)) + kHeld;
}

int LoaderEngine::acquire() {
  State& s = *state_;
  while (s.copier && s.copier->num_unfinished() > 0 &&
         (s.copier->num_unfinished() >= kHeld || s.copier->oldest_finished())) {
    s.copier->finish_oldest();
    s.ring->release();
  }
  const TraceScope trace("wait for a batch", "loader", TraceSpan::Clock::Host);
  const auto begin = std::chrono::steady_clock::now();
  RingPayload* payload = s.ring->acquire();
  s.waited += std::chrono::steady_clock::now() - begin;
  if (!payload) {
    s.batches.fail_without_batch();
  }
  return payload->slot;
}

bool LoaderEngine::ready() const {
  return state_->ring->ready();
}

void LoaderEngine::release() {
  state_->ring->release();
}

void LoaderEngine::consume() {
  std::lock_guard lock(state_->mutex);
  state_->consumed = state_->after.front();
  state_->after.pop_front();
}

void LoaderEngine::restart(LoaderPlace place) {
  state_->start(place);
}

bool LoaderEngine::copies_to_device() const {
  return state_->copier != nullptr;
}

void LoaderEngine::copy_to_device(const std::vector<at::Tensor*>& tensors) {
  state_->copier->start(tensors);
}

void LoaderEngine::make_on_device(const std::function<void()>& work) {
  state_->copier->start(work);
}

void LoaderEngine::join_copy(const std::vector<at::Tensor*>& tensors) {
  state_->copier->join(tensors);
}

LoaderPlace LoaderEngine::place() const {
  return state_->consumed;
}

double LoaderEngine::wait_ms() const {
  return std::chrono::duration<double, std::milli>(state_->waited).count();
}

void fail_for_size(const DistributedSampler& sampler, int64_t dataset_size) {
  throw SettingsError(concat("DataLoader: the sampler was made for ", sampler.size(),
                             " samples, the data set has ", dataset_size,
                             ": construct it with dataset->size()"));
}

}  // namespace ddp::detail
