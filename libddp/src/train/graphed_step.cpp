// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/graphed_step.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "ddp/core/logging.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "train/captured_step.hpp"
#include "train/step_ring.hpp"

#ifdef DDP_HAS_CUDA
#include "train/captured_graph.hpp"
#endif

namespace ddp::detail {
namespace {

/// What makes one graph another: which batch, and in which modes.
using Key = std::vector<int64_t>;

void add_layout(const at::Tensor& tensor, Key& key) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  key.push_back(tensor.is_cpu() ? 0 : 1);
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

std::string shapes_of(const std::vector<at::Tensor*>& inputs) {
  std::ostringstream out;
  for (const at::Tensor* input : inputs) {
    if (input->defined()) {
      out << (out.tellp() > 0 ? " " : "") << input->sizes();
    }
  }
  return out.str();
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

}  // namespace

struct GraphedStepCore::State {
  State(Context& ctx, GraphedParts given, GraphedStepOptions opts, std::shared_ptr<GraphPool> p)
      : context(ctx),
        parts(std::move(given)),
        options(std::move(opts)),
        device(ctx.device()),
        pool(std::move(p)) {
    check(options, device);
    ring = std::make_shared<StepRing>(device, [this] { check_job(); });
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

  struct Entry {
    Key key;
    int64_t eager_steps = 0;
    std::unique_ptr<CapturedStep> graph;
  };

  void check_job() const;
  void make_key(const StepCall& call);
  uint64_t fingerprint() const;
  std::string why_not() const;
  bool is_settled() const;
  Entry* find_entry();
  bool may_capture(const Entry& entry) const;
  StepDone run(StepCall& call);
  StepDone run_eager(StepCall& call);
  void give_up(const std::string& reason);
#ifdef DDP_HAS_CUDA
  StepDone run_cuda(StepCall& call);
  StepDone replay(Entry& entry, StepCall& call);
  bool capture(Entry& entry, StepCall& call);
  std::string agree(const std::string& own, int64_t num_operations);
  int64_t num_operations() const;
  std::string try_capture(Entry& entry, StepCall& call, int64_t* operations);
#endif

  Context& context;
  const GraphedParts parts;
  const GraphedStepOptions options;
  const at::Device device;
  std::shared_ptr<GraphPool> pool;
  std::shared_ptr<StepRing> ring;
#ifdef DDP_HAS_CUDA
  std::optional<StepFeed> feed;
#endif
  bool wanted = false;  // to capture
  bool too_many_said = false;
  uint64_t sequence = 0;
  uint64_t last_fingerprint = 0;
  Key key;  // of the present call
  std::vector<Entry> entries;
  GraphedStepCounts counts;
};

// A replay calls nothing that would notice that the job failed.
void GraphedStepCore::State::check_job() const {
  auto& plane = context.control_plane();
  if (plane.failed()) {
    throw PeerLostError(plane.failure().to_line());
  }
#ifdef DDP_HAS_CUDA
  if (device.is_cuda()) {
    check_device(device);
  }
#endif
}

void GraphedStepCore::State::make_key(const StepCall& call) {
  key.clear();
  key.push_back(call.numbers.variant);
  key.push_back(at::GradMode::is_enabled());
  for (const auto* model : parts.models) {
    key.push_back(model->is_training());
  }
  for (const at::Tensor* input : call.inputs) {
    add_layout(*input, key);
  }
}

// What a graph has burned in and must not change under it: where parameters are and what is trained
// of them, and how the buckets lie.
uint64_t GraphedStepCore::State::fingerprint() const {
  uint64_t hash = 0xCBF29CE484222325ULL;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001B3ULL; };
  for (auto* model : parts.models) {
    add(static_cast<uint64_t>(model->reducer().layout().version));
    for (const auto& parameter : model->named_parameters()) {
      add(reinterpret_cast<uintptr_t>(parameter.tensor.const_data_ptr()));
      add(parameter.tensor.requires_grad() ? 1 : 2);
    }
  }
  return hash;
}

/// Why this step cannot be captured, as far as it can be told beforehand. Empty: it may be.
std::string GraphedStepCore::State::why_not() const {
  for (const auto* optimizer : parts.optimizers) {
    if (!optimizer->capturable()) {
      return concat("the optimizer (", optimizer->state_name(),
                    ") cannot be captured: its step needs numbers on the host, as torch::optim's "
                    "do; use ddp::make_optimizer");
    }
  }
  for (const auto* model : parts.models) {
    if (model->options().find_unused_parameters && !model->options().static_graph) {
      return "ddp.find_unused_parameters=true reads on the host which parameters were used; set it "
             "to false, or ddp.static_graph=true";
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

/// Null: there are as many graphs as are allowed.
GraphedStepCore::State::Entry* GraphedStepCore::State::find_entry() {
  for (auto& entry : entries) {
    if (entry.key == key) {
      return &entry;
    }
  }
  if (static_cast<int64_t>(entries.size()) == options.max_graphs) {
    return nullptr;
  }
  entries.push_back({key, 0, nullptr});
  return &entries.back();
}

bool GraphedStepCore::State::may_capture(const Entry& entry) const {
  const bool first = counts.captures == 0;
  return entry.eager_steps >= (first ? options.warmup_steps : 1) && is_settled();
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
    if (wanted) {  // as in the graph that is to come
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

#ifdef DDP_HAS_CUDA

StepDone GraphedStepCore::State::run_cuda(StepCall& call) {
  if (context.control_plane().failed()) {
    check_job();
  }
  ++sequence;
  if (sequence > StepLog::kMaxStepsAhead) {
    ring->wait(sequence - StepLog::kMaxStepsAhead);
  }
  if (!wanted) {
    return run_eager(call);
  }
  if (const auto now = fingerprint(); now != last_fingerprint) {
    last_fingerprint = now;
    entries.clear();
    counts.graphs = 0;
  }
  make_key(call);
  Entry* entry = find_entry();
  if (entry == nullptr) {
    if (!too_many_said && context.is_main()) {
      log_warning(concat(options.name, " met more than ", options.max_graphs,
                         " kinds of batches (now ", shapes_of(call.inputs),
                         "): these run without a CUDA graph; batches of one shape, or a larger "
                         "GraphedStepOptions::max_graphs, would not"));
    }
    too_many_said = true;
    return run_eager(call);
  }
  if (entry->graph == nullptr) {
    if (const auto reason = why_not(); !reason.empty()) {
      give_up(reason);
      return run_eager(call);
    }
    if (!may_capture(*entry) || !capture(*entry, call)) {
      if (wanted) {
        ++entry->eager_steps;
      }
      return run_eager(call);
    }
  }
  return replay(*entry, call);
}

StepDone GraphedStepCore::State::replay(Entry& entry, StepCall& call) {
  const TraceScope trace("graphed step", "compute");
  entry.graph->replay(call.numbers, sequence, call.inputs);
  ++counts.replayed;
  return {entry.graph->object(), ring->log(sequence, entry.graph->num_scalars())};
}

int64_t GraphedStepCore::State::num_operations() const {
  std::set<Communicator*> communicators{context.communicator().get()};
  for (const auto* model : parts.models) {
    communicators.insert(model->communicator().get());
  }
  int64_t sum = 0;
  for (const auto* communicator : communicators) {
    sum += communicator->num_operations();
  }
  return sum;
}

/// The reason why it failed here; empty: it did not.
std::string GraphedStepCore::State::try_capture(Entry& entry, StepCall& call, int64_t* operations) {
  std::vector<std::shared_ptr<const Reducer::HostState>> states;
  for (auto* model : parts.models) {
    states.push_back(model->reducer().host_state());
  }
  const auto inputs_before = [&] {
    std::vector<at::Tensor> inputs;
    for (const at::Tensor* input : call.inputs) {
      inputs.push_back(*input);
    }
    return inputs;
  }();
  free_cached_memory();
  const int64_t before = num_operations();
  std::string failing;
  std::string reason;
  try {
    entry.graph = CapturedStep::capture({.feed = *feed,
                                         .ring = *ring,
                                         .pool = *pool,
                                         .generators = parts.generators,
                                         .call = call,
                                         .sequence = sequence},
                                        &failing);
  } catch (const PeerLostError&) {
    throw;
  } catch (const std::exception&) {
    reason = capture_failure(std::current_exception(), failing);
  }
  *operations = num_operations() - before;
  // The replay, or the eager step, reads the batch itself.
  for (size_t i = 0; i < inputs_before.size(); ++i) {
    *call.inputs[i] = inputs_before[i];
  }
  if (!reason.empty()) {
    for (size_t i = 0; i < states.size(); ++i) {
      parts.models[i]->reducer().restore(*states[i]);
    }
    if (parts.scaler != nullptr) {
      parts.scaler->reset_step();
    }
  }
  return reason;
}

/// The first rank's reason, on all ranks; empty: all captured the same collectives.
std::string GraphedStepCore::State::agree(const std::string& own, int64_t num_operations) {
  if (context.world_size() == 1) {
    return own;
  }
  const auto texts =
      context.control_plane().all_gather(concat(num_operations, own.empty() ? "" : " ", own));
  std::vector<int64_t> numbers;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (const auto space = texts[rank].find(' '); space != std::string::npos) {
      return concat("on rank ", rank, ": ", texts[rank].substr(space + 1));
    }
    numbers.push_back(std::stoll(texts[rank]));
    if (numbers[rank] != numbers[0]) {
      return concat("the ranks captured different steps: rank ", rank, " calls ", numbers[rank],
                    " collectives in it, rank 0 ", numbers[0],
                    "; every rank has to run the same step");
    }
  }
  return {};
}

/// False: this step has to run eagerly, and all others if give_up() was called.
bool GraphedStepCore::State::capture(Entry& entry, StepCall& call) {
  int64_t operations = 0;
  auto reason = agree(try_capture(entry, call, &operations), operations);
  if (reason.empty()) {
    try {
      entry.graph->instantiate();
    } catch (const std::exception&) {
      reason = capture_failure(std::current_exception(), "cudaGraphInstantiate");
    }
    reason = agree(reason, operations);
  }
  if (!reason.empty()) {
    give_up(reason);
    return false;
  }
  ++counts.captures;
  ++counts.graphs;
  if (context.is_main()) {
    log_info(concat(options.name, " is a CUDA graph now: ", entry.graph->num_nodes(),
                    " nodes, batch ", shapes_of(call.inputs)));
  }
  return true;
}

#else

struct CapturedStep::Impl {};
CapturedStep::~CapturedStep() = default;

#endif

GraphedStepCore::GraphedStepCore(Context& context, GraphedParts parts, GraphedStepOptions options,
                                 std::shared_ptr<GraphPool> pool)
    : state_(
          std::make_shared<State>(context, std::move(parts), std::move(options), std::move(pool))) {
  // Before the communicators: their memory and plans are part of the graphs.
  context.add_teardown([weak = std::weak_ptr(state_)] {
    if (const auto state = weak.lock()) {
      state->wanted = false;
      state->entries.clear();
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
