// SPDX-License-Identifier: Apache-2.0
#include "ddp/detail/prefetch_source.hpp"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "core/launch/place_in_loop.hpp"
#include "core/log/error_text.hpp"
#include "core/log/trace_recorder.hpp"
#include "data/images/batch_builders.hpp"
#include "data/loader/batch_plan.hpp"
#include "data/loader/input_wait.hpp"
#include "data/loader/prefetch_ring.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/detail/trace_scope.hpp"

#ifdef DDP_HAS_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

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

/// Host to device copies on a separate stream.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  /// Starts a copy and replaces each tensor by its device tensor. The host memory must stay
  /// unchanged until finish_oldest().
  virtual void start(const std::vector<at::Tensor*>& tensors) = 0;
  /// Runs `work` on the copy stream. It may read host memory until finish_oldest().
  virtual void start(const std::function<void()>& work) = 0;
  /// The current stream waits for the oldest copy not yet joined. `tensors` are its device tensors.
  virtual void join(const std::vector<at::Tensor*>& tensors) = 0;
  /// Copies whose host memory may still be read.
  virtual int num_unfinished() const = 0;
  /// Whether the oldest unfinished copy is done with the host memory; never blocks.
  virtual bool oldest_finished() = 0;
  /// The host waits for the oldest unfinished copy and forgets that copy.
  virtual void finish_oldest() = 0;
  /// The host waits for all copies and forgets those not joined.
  virtual void reset() = 0;
};

#ifdef DDP_HAS_CUDA
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
          // Page-locked buffers belong to the loader's slots or to LibTorch's allocator, which
          // waits for their copies. Other buffers may be freed here: a copy from pageable memory
          // has finished reading when it returns.
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

#endif

// Returns nullptr for the CPU.
std::unique_ptr<DeviceCopier> make_device_copier(at::Device device) {
  if (device.is_cpu()) {
    return nullptr;
  }
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    return std::make_unique<CudaCopier>(device);
  }
#endif
  throw SettingsError(concat("DataLoader: this build does not support the device ", device.str()));
}

[[noreturn]] void rethrow_with(const std::string& where) {
  try {
    throw;
  } catch (const DataError& e) {
    throw DataError(e.what() + where);
  } catch (const SettingsError& e) {
    throw SettingsError(e.what() + where);
  } catch (const Error& e) {
    throw Error(e.exit_code(), e.what() + where);
  } catch (const std::exception& e) {
    std::throw_with_nested(Error(ExitCode::UserException, message_of(e) + where));
  }
}

// Each worker that runs a large op would start an OpenMP team of its own. These teams compete for
// the cores, and every op waits for its slowest thread. at::set_num_threads would also change the
// threads that the program starts later.
void use_one_openmp_thread() {
  at::get_num_threads();  // LibTorch sets its number at a thread's first use
  using SetNumThreads = void (*)(int);
  const auto set = reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set != nullptr) {  // LibTorch brings its own OpenMP library, which has no header
    set(1);
  }
}

/// "3, 8, 1" or "3, 8, 1, 7, …".
std::string first_indices(const std::vector<int64_t>& indices) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < indices.size() && i < kShown; ++i) {
    text += concat(i == 0 ? "" : ", ", indices[i]);
  }
  return indices.size() > kShown ? text + ", …" : text;
}

}  // namespace

void rethrow_with_sample(int64_t index, int64_t epoch) {
  rethrow_with(concat(" (loading sample ", index, " of epoch ", epoch, ")"));
}

void pin_tensors(const std::vector<at::Tensor*>& tensors) {
  for (at::Tensor* tensor : tensors) {
    // pin_memory() refuses tensors whose elements share memory. A plain copy takes those.
    if (tensor->defined() && tensor->is_cpu() && tensor->layout() == at::kStrided &&
        tensor->is_non_overlapping_and_dense()) {
      *tensor = tensor->pin_memory();
    }
  }
}

struct LoaderEngine::State {
  State(const DistributedSampler& original, at::Device device, const LoaderOptions& opts,
        SlotFiller& slot_filler)
      : options(opts),
        filler(slot_filler),
        batches(original, opts),
        sampler(original),
        copier(make_device_copier(device)),
        wait(copier ? device : at::kCPU) {}

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

  void finish(const RingPayload& payload) {
    try {
      filler.finish(payload.slot);
    } catch (...) {
      rethrow_with(concat(" (loading the batch of samples ", first_indices(payload.indices),
                          " of epoch ", payload.epoch, ")"));
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
                     .finish = [this](RingPayload& p) { finish(p); },
                     .start_worker = use_one_openmp_thread});
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
  InputWait wait;
  std::unique_ptr<Ring> ring;  // destroyed first
};

LoaderEngine::LoaderEngine(const DistributedSampler& sampler, at::Device device,
                           const LoaderOptions& options, SlotFiller& filler) {
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
  s.wait.forget();
  std::optional<BatchWait> shown;
  if (!s.ring->ready()) {
    s.wait.begin();
    shown.emplace(s.consumed.position / s.batches.global_size(), s.consumed.epoch);
  }
  RingPayload* payload = s.ring->acquire();
  shown.reset();
  if (!payload) {
    s.batches.fail_without_batch();
  }
  if (!s.copier) {  // else join_copy()
    s.wait.end();
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
  state_->wait.end();
}

LoaderPlace LoaderEngine::place() const {
  return state_->consumed;
}

double LoaderEngine::wait_ms() const {
  return state_->wait.milliseconds();
}

void fail_for_size(const DistributedSampler& sampler, int64_t dataset_size) {
  throw SettingsError(concat("DataLoader: the sampler was made for ", sampler.size(),
                             " samples, but the data set has ", dataset_size,
                             "; fix: construct the sampler with dataset->size()"));
}

}  // namespace ddp::detail
