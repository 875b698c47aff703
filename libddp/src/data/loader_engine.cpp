// SPDX-License-Identifier: Apache-2.0
#include "ddp/data/loader_engine.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "data/batch_plan.hpp"
#include "data/device_copy.hpp"
#include "data/loader_state.hpp"
#include "data/prefetch_ring.hpp"
#include "data/sample_error.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/trace_recorder.hpp"

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
        BatchBuilder& batch_builder)
      : options(opts),
        builder(batch_builder),
        shape(shape_of(original)),
        sampler(original),
        batch_size(global_batch_size(original, opts)),
        copier(make_device_copier(device)) {}

  // Called by the ring, one call at a time.
  std::optional<int64_t> plan(RingPayload& payload) {
    auto batch = plan_batch(sampler, planned.position, batch_size, options.drop_last);
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
    const bool last = count_batches(shape, batch->end, batch_size, options.drop_last) == 0;
    {
      std::lock_guard lock(mutex);
      after.push_back(last ? Place{planned.epoch + 1, 0} : planned);
    }
    const auto count = static_cast<int64_t>(payload.indices.size());
    builder.resize(payload.slot, count);
    return count;
  }

  void fill(RingPayload& payload, int64_t begin, int64_t end) {
    const TraceScope trace("load samples", "loader threads", TraceSpan::Clock::Host);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = payload.indices[static_cast<size_t>(i)];
      try {
        builder.fill(payload.slot, i, index, payload.epoch);
      } catch (...) {
        rethrow_with_sample(index, payload.epoch);
      }
    }
  }

  void start(Place place) {
    ring.reset();  // joins the workers before their inputs change
    if (copier) {
      copier->reset();
    }
    if (sampler.epoch() != place.epoch) {
      sampler.set_epoch(place.epoch);
    }
    // The end of an epoch is stored as the start of the next.
    if (place.position > 0 &&
        count_batches(shape, place.position, batch_size, options.drop_last) == 0) {
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
                     .finish = [this](RingPayload& p) { builder.finish(p.slot); }});
  }

  LoaderOptions options;
  BatchBuilder& builder;
  DistributedSampler shape;    // without a permutation: for counting, from the consumer's thread
  DistributedSampler sampler;  // used only by plan()
  int64_t batch_size;
  std::unique_ptr<DeviceCopier> copier;
  Place planned;
  Place consumed;
  int64_t num_planned = 0;
  std::mutex mutex;
  std::deque<Place> after;  // of each batch planned and not yet consumed
  std::chrono::nanoseconds waited{0};
  std::unique_ptr<Ring> ring;  // destroyed first
};

LoaderEngine::LoaderEngine(const DistributedSampler& sampler, at::Device device,
                           const LoaderOptions& options, BatchBuilder& builder) {
  options.taken.set();
  check_loader_options(sampler, options);
  state_ = std::make_unique<State>(sampler, device, options, builder);
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

int64_t LoaderEngine::max_batch(const DistributedSampler& sampler, const LoaderOptions& options) {
  check_loader_options(sampler, options);
  const int64_t world_size = sampler.world_size();
  return (global_batch_size(sampler, options) + world_size - 1) / world_size;
}

LoadedBatch LoaderEngine::acquire() {
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
    fail_without_batch(s.shape, s.batch_size);
  }
  return {payload->slot, static_cast<int64_t>(payload->indices.size())};
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

void LoaderEngine::restart(int64_t epoch, int64_t position) {
  state_->start({epoch, position});
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

int64_t LoaderEngine::epoch() const {
  return state_->consumed.epoch;
}
int64_t LoaderEngine::position() const {
  return state_->consumed.position;
}

int64_t LoaderEngine::num_batches() const {
  return count_batches(state_->shape, 0, state_->batch_size, state_->options.drop_last);
}

int64_t LoaderEngine::batches_left() const {
  return count_batches(state_->shape, position(), state_->batch_size, state_->options.drop_last);
}

double LoaderEngine::wait_ms() const {
  return std::chrono::duration<double, std::milli>(state_->waited).count();
}

StateDict LoaderEngine::state_dict() const {
  return make_loader_state(state_->sampler, epoch(), position());
}

void LoaderEngine::load_state_dict(const StateDict& state) {
  const auto [epoch, position] = read_loader_state(state, state_->sampler);
  restart(epoch, position);
}

}  // namespace ddp::detail
