// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/graphed_step.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <sstream>
#include <utility>

#include "ddp/core/logging.hpp"
#include "ddp/ops/overwritten.hpp"
#include "train/graphed_step_state.hpp"

namespace ddp::detail {
namespace {

/// Kinds remembered without a graph: comparing this many takes as long as a few kernel launches.
constexpr int64_t kKindsRemembered = 256;

void add_layout(const at::Tensor& tensor, Key& key) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  key.push_back(tensor.is_cpu() ? 0 : 1);
  key.push_back(tensor.requires_grad() ? 1 : 0);
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

void check(const GraphedStepOptions& options, at::Device device) {
  if (options.warmup_steps < 1) {
    throw SettingsError(concat("GraphedStep: warmup_steps is ", options.warmup_steps,
                               ": must be 1 or more, for what is made once must not be captured"));
  }
  if (options.max_graphs < 1) {
    throw SettingsError(concat("GraphedStep: max_graphs is ", options.max_graphs,
                               ": must be 1 or more; CudaGraph::Off captures nothing"));
  }
  if (options.mode == CudaGraph::On && !device.is_cuda()) {
    throw SettingsError(concat("CUDA graphs are on (train.cuda_graph=on) for ", options.name,
                               ", but this run is on ", device,
                               ": use auto, or a GPU (context.device=cuda)"));
  }
}

// All ranks make steps that need all ranks in the same order.
int64_t next_id(bool collective) {
  static std::atomic<int64_t> count{0};
  return collective ? ++count : 0;
}

}  // namespace

std::string shapes_of(const StepCall& call) {
  std::ostringstream out;
  const auto space = [&out] { return out.tellp() > 0 ? " " : ""; };
  for (const at::Tensor* input : call.inputs) {
    if (input->defined()) {
      out << space() << input->sizes();
    }
  }
  for (const int64_t number : call.host_numbers) {
    out << space() << number;
  }
  return out.str();
}

GraphedStepCore::State::State(Context& ctx, GraphedParts given, GraphedStepOptions opts,
                              std::shared_ptr<GraphPool> p)
    : context(ctx),
      parts(std::move(given)),
      options(std::move(opts)),
      device(ctx.device()),
      pool(std::move(p)),
      id(next_id(options.collective)),
      board(options.collective ? dynamic_cast<NoteBoard*>(&ctx.control_plane()) : nullptr) {
  check(options, device);
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    feed.emplace(device);
    wanted = options.mode != CudaGraph::Off;
    if (pool == nullptr && wanted) {
      pool = std::make_shared<GraphPool>();
    }
  }
#endif
}

// Called by the context's teardown, before the communicators, whose memory and plans graphs hold.
void GraphedStepCore::State::end() {
  wanted = false;
  ended = true;
  entries.clear();
}

// A replay makes no call that would notice a failed job.
void GraphedStepCore::State::check_job() const {
  if (ended) {
    return;
  }
  auto& plane = context.control_plane();
  if (plane.failed()) {
    throw PeerLostError(plane.failure().to_line());
  }
  look_at_notes();
}

// Another rank may wait to capture a call that this rank did not capture: it would wait forever.
void GraphedStepCore::State::look_at_notes() const {
  if (board == nullptr || board->notes_version() == notes_seen) {
    return;
  }
  const auto version = board->notes_version();
  const bool is_to_come = require_no_missed_capture(
      board->notes(), static_cast<size_t>(context.rank()), id, static_cast<int64_t>(calls_done),
      static_cast<int64_t>(last_captured), options.name, last_shapes);
  if (!is_to_come) {
    notes_seen = version;
  }
}

void GraphedStepCore::State::make_key(const StepCall& call) {
  key.clear();
  key.push_back(call.numbers.variant);
  key.push_back(at::GradMode::is_enabled());
  const bool autocast = at::autocast::is_autocast_enabled(device.type());
  key.push_back(autocast ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device.type()))
                         : -1);
  for (const auto* model : parts.models) {
    key.push_back(model->require_backward_grad_sync());
    key.push_back(static_cast<int64_t>(model->training_modes()));
  }
  key.insert(key.end(), call.host_numbers.begin(), call.host_numbers.end());
  for (const at::Tensor* input : call.inputs) {
    add_layout(*input, key);
  }
}

// Hashes what a graph has baked in: the addresses of parameters, which of them are trained, the
// optimizers' state, and the scaler's settings.
uint64_t GraphedStepCore::State::fingerprint() const {
  uint64_t hash = 0xCBF29CE484222325ULL;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001B3ULL; };
  for (auto* model : parts.models) {
    for (const auto& [name, tensor] : model->all_parameters()) {
      add(tensor.has_storage() ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) : 0);
      add((tensor.requires_grad() ? 1 : 2) + (ops::is_watched(tensor) ? 4 : 0));
    }
  }
  for (const auto* optimizer : parts.optimizers) {
    add(static_cast<uint64_t>(optimizer->num_changes()));
  }
  if (const auto* scaler = parts.scaler) {
    add(std::bit_cast<uint64_t>(scaler->get_growth_factor()));
    add(std::bit_cast<uint64_t>(scaler->get_backoff_factor()));
    add(static_cast<uint64_t>(scaler->get_growth_interval()));
  }
  return hash;
}

// The bucket layout is also baked into a training graph, so a new layout invalidates it.
uint64_t GraphedStepCore::State::layouts() const {
  uint64_t sum = 0;  // versions only grow
  for (auto* model : parts.models) {
    sum += static_cast<uint64_t>(model->reducer().gradients().layout().version);
  }
  return sum;
}

void GraphedStepCore::State::drop_stale_graphs() {
  drop_graphs_of_changed_parts();
  if (const auto now = layouts(); now != std::exchange(last_layouts, now)) {
    drop_graphs(/*evaluations=*/false);
  }
}

void GraphedStepCore::State::drop_graphs_of_changed_parts() {
  if (const auto now = fingerprint(); now != std::exchange(last_fingerprint, now)) {
    drop_graphs(/*evaluations=*/true);
  }
}

void GraphedStepCore::State::drop_graphs(bool evaluations) {
  for (Entry& entry : entries) {
    if (evaluations || entry.trains) {
      entry.drop_graph();
    }
  }
  counts.graphs = std::count_if(entries.begin(), entries.end(),
                                [](const Entry& entry) { return entry.graph != nullptr; });
}

void GraphedStepCore::State::Entry::drop_graph() {
  steps_before += std::exchange(eager_steps, 0);
  has_block = false;
  graph.reset();
  gradients_before.reset();
  states_after.clear();
}

// Decides whether a backward overwrites or accumulates.
uint64_t GraphedStepCore::State::defined_gradients() const {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (auto* model : parts.models) {
    for (const auto& parameter : model->named_parameters()) {
      hash = (hash ^ (parameter.tensor.grad().defined() ? 1U : 2U)) * 0x100000001B3ULL;
    }
  }
  return hash;
}

/// Why this step cannot be captured, as far as known beforehand. Empty: it may be.
std::string GraphedStepCore::State::why_not() const {
  for (const auto* optimizer : parts.optimizers) {
    if (!optimizer->capturable()) {
      return concat("the optimizer (", optimizer->state_name(),
                    ") cannot be captured: its step needs numbers on the host, as torch::optim's "
                    "do; use ddp::make_optimizer");
    }
  }
  for (auto* model : parts.models) {
    if (auto reason = model->reducer().why_not_captured(); !reason.empty()) {
      return reason;
    }
    if (model->is_joining()) {
      return "inside join() the ranks tell each other before every forward who still has input";
    }
    const std::string backend = model->communicator()->backend();
    if (backend != "nccl" && backend != "single") {
      return concat("the communicator is ", backend, ", whose collectives the host carries out");
    }
  }
#ifdef DDP_HAS_CUDA
  if (device.is_cuda() && !stream_can_be_captured(device)) {
    return "this thread's current stream is the default stream, which cannot be captured: run "
           "steps in the thread that made the Context, before another stream is set";
  }
#endif
  return {};
}

bool GraphedStepCore::State::is_settled() const {
  return !at::GradMode::is_enabled() ||
         std::all_of(parts.models.begin(), parts.models.end(),
                     [](DataParallelModel* model) { return model->reducer().is_settled(); });
}

/// Null: the kind has no graph, and the number of graphs is at its limit.
GraphedStepCore::State::Entry* GraphedStepCore::State::find_entry(const StepCall& call) {
  const bool full = counts.graphs == options.max_graphs;
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [this](const Entry& entry) { return entry.key == key; });
  if (found != entries.end() && found->graph != nullptr) {
    return &*found;
  }
  if (full) {
    return nullptr;
  }
  if (found != entries.end()) {
    std::rotate(found, found + 1, entries.end());  // the one met last
    return &entries.back();
  }
  // Kinds that occur once are evicted for kinds that recur.
  if (static_cast<int64_t>(entries.size()) - counts.graphs >= max_remembered()) {
    entries.erase(std::find_if(entries.begin(), entries.end(),
                               [](const Entry& entry) { return entry.graph == nullptr; }));
    warn_of_kinds(call);
  }
  entries.push_back({.key = key, .shapes = shapes_of(call), .trains = at::GradMode::is_enabled()});
  return &entries.back();
}

int64_t GraphedStepCore::State::max_remembered() const {
  return std::max(kKindsRemembered, options.max_graphs);
}

/// Warns once that there are too many kinds for each to have a graph.
void GraphedStepCore::State::warn_of_kinds(const StepCall& call) {
  if (std::exchange(too_many_said, true) || !context.is_main()) {
    return;
  }
  const std::string met =
      counts.graphs == options.max_graphs
          ? concat("has CUDA graphs of ", options.max_graphs, " kinds of batches and met another")
          : concat("met ", max_remembered(), " kinds of batches without a CUDA graph and another");
  log_warning(concat(options.name, " ", met, " (now ", shapes_of(call),
                     "): such batches run without a CUDA graph; batches of one shape, or a larger "
                     "GraphedStepOptions::max_graphs, would not"));
}

bool GraphedStepCore::State::may_capture(const Entry& entry) const {
  const bool first = counts.captures == 0;
  return entry.eager_steps > 0 && entry.all_steps() >= (first ? options.warmup_steps : 1) &&
         is_settled();
}

void GraphedStepCore::State::give_up(const std::string& reason) {
  wanted = false;
  entries.clear();
  counts.graphs = 0;
  counts.why_eager = reason;
  if (options.mode == CudaGraph::On) {
    throw SettingsError(concat("CUDA graphs are on (train.cuda_graph=on), but ", options.name,
                               " cannot be captured: ", reason,
                               "; fix that, or use auto (eager steps) or off"));
  }
  if (context.is_main()) {
    log_warning(concat(options.name, " runs without a CUDA graph: ", reason));
  }
}

StepDone GraphedStepCore::State::run(StepCall& call) {
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    return run_cuda(call);
  }
#endif
  return run_eager(call);
}

StepDone GraphedStepCore::State::run_eager(StepCall& call) {
  ++counts.eager;
  const auto& numbers = call.numbers;
  StepScalars scalars{.lr = numbers.lr, .step = static_cast<double>(numbers.step)};
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    feed_eagerly(*feed, numbers, sequence, call.inputs);
    if (wanted) {  // as in the later graph
      scalars = {.lr = feed->number(StepFeed::kLr), .step = feed->number(StepFeed::kStep)};
    }
    auto output = call.run(scalars);
    const auto logged = StepRing::scalars_of(output.tensors);
    ring->publish(logged, feed->sequence());
    return {std::move(output.object), ring->log(sequence, static_cast<int>(logged.size()))};
  }
#endif
  auto output = call.run(scalars);
  auto log = StepRing::log_now(StepRing::scalars_of(output.tensors));
  return {std::move(output.object), log};
}

#ifndef DDP_HAS_CUDA

struct CapturedStep::Impl {};
CapturedStep::~CapturedStep() = default;

#endif

GraphedStepCore::GraphedStepCore(Context& context, GraphedParts parts, GraphedStepOptions options,
                                 std::shared_ptr<GraphPool> pool)
    : state_(
          std::make_shared<State>(context, std::move(parts), std::move(options), std::move(pool))) {
  const auto device = context.device();
  // Logs hold the ring, and may be read after this object's destruction.
  state_->ring = std::make_shared<StepRing>(device, [weak = std::weak_ptr(state_), device] {
    if (const auto state = weak.lock()) {
      state->check_job();
    }
#ifdef DDP_HAS_CUDA
    if (device.is_cuda()) {
      check_device(device);
    }
#endif
  });
  context.add_teardown([weak = std::weak_ptr(state_)] {
    if (const auto state = weak.lock()) {
      state->end();
    }
  });
}

GraphedStepCore::~GraphedStepCore() = default;

StepDone GraphedStepCore::run(StepCall& call) {
  return state_->run(call);
}

void GraphedStepCore::drop_graphs() {
  state_->entries.clear();
  state_->counts.graphs = 0;
}

GraphedStepCounts GraphedStepCore::counts() const {
  return state_->counts;
}

const std::shared_ptr<GraphPool>& GraphedStepCore::pool() const {
  return state_->pool;
}

}  // namespace ddp::detail
