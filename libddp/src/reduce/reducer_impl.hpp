// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ddp/comm/launch_sequencer.hpp"
#include "ddp/core/trace_recorder.hpp"
#include "ddp/ops/grad_slot.hpp"
#include "ddp/reduce/reducer.hpp"
#include "reduce/bucket_scheduler.hpp"
#include "reduce/buffer_broadcast.hpp"
#include "reduce/time_mark.hpp"

namespace ddp {

// One synchronised backward, world size > 1, in time (compute stream above, communicator below):
//
//   forward | hook hook hook   hook hook       hook  | callback
//           |          gather0      gather1          gather2 | wait, scale, .grad = views
//           |                \\launch    \\launch         \\launch
//   comm    |                 [reduce 0] [reduce 1 ]    [reduce 2]
//
// gather: gradients that AccumulateGrad stole are copied into the bucket by one multi-tensor
// kernel; launch: the communicator's stream waits for the gather and reduces; callback: runs when
// the whole backward is over, makes the *compute stream* wait for each reduction (CPU: this
// thread), never the host.
struct Reducer::Impl {
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::shared_ptr<torch::autograd::Node> accumulator;  // kept alive: the tensor holds it weakly
    uintptr_t hook_key = 0;
    int key = 0;
    ops::GradSlot slot;
    bool used = false;     // got a gradient since the last synchronised backward, no_sync included
    bool reduced = false;  // what the slot holds came from a reduction (and may have been added to)
    at::Tensor set_aside;  // such a gradient, while a pass divides by something else than the world
    int fires = 0;         // of its hook in the running pass
    int expected_fires = 1;  // static_graph: what the first pass counted
  };
  struct BucketState {
    GradBucket bucket;
    WorkPtr work;
    std::vector<c10::Stream> streams;  // on which its gradients were accumulated
    std::vector<c10::Stream> writers;  // on which ops wrote its slots
    at::Tensor buffer;                 // bucket.buffer, which a hook may replace
  };

  // Lives in the graph of a forward.
  struct ForwardState {
    std::atomic<bool> reached = false;  // by a backward
    std::atomic<bool> closed = false;   // its pass ended although outputs were not reached
  };

  Impl(NamedParameters parameters, CommunicatorPtr communicator, const DdpOptions& options);
  ~Impl();

  // Construction and layout (reducer.cpp)
  void allocate_arena();
  void install_layout(BucketLayout layout);
  void install_hooks();
  void compare_hooks();

  // The rebuild (reducer_buckets.cpp)
  bool will_rebuild() const;
  bool rebuild_is_due();
  void rebuild();
  std::string plan_name() const;
  std::optional<std::string> planned_buckets();
  bool measures_buckets();
  void begin_ready_times();
  void note_ready_time(int parameter, bool all_ready);
  std::string choose_buckets_here(const std::vector<int>& order, const AllReduceTable& table);
  std::vector<int> agree_on_cuts(const std::vector<int>& order);

  // One pass (reducer_pass.cpp)
  void prepare(const std::vector<at::Tensor>& outputs);
  void begin_pass();
  void forget_writes();
  void check_previous_pass() const;
  void check_parameters() const;
  void on_gradient(int index);
  void warn_unannounced(const Parameter& parameter);
  void check_gradient(const Parameter& parameter) const;
  void on_gradient_static_graph(int index);
  void queue_static_graph_end();
  void end_static_graph_count();
  void mark_unused_parameters();
  void mark_ready(int index);
  void note_streams(int bucket, const ops::GradSlot& slot);
  void gather(int bucket);
  void gather_parameter_lists(const std::vector<int>& parameters);
  void attach_gradients();
  void refuse_partial(const Parameter& parameter) const;

  // Full buckets (reducer_launch.cpp)
  void launch(int bucket);
  c10::Stream stream_behind_gradients(size_t first, size_t last);
  void start_reductions(size_t first, size_t last);
  void join_broken_pass();

  // Its end (reducer_finish.cpp)
  void finish_pass();
  void finish_buckets();
  void finish_bucket(BucketState& state);
  void take_buffer_of_hook(BucketState& state) const;
  void shadow();

  // Forwards whose backward is still to come (open_forwards.cpp)
  void open_forward(const std::vector<at::Tensor>& outputs);
  void forget_ended_forwards();
  void reach_output(ForwardState& state);
  void end_forwards_of_pass();
  void note_local_forward();
  void refuse_second_backward() const;

  // Gradients of an earlier pass in a weighted one (reducer_finish.cpp)
  void set_reduced_aside();
  void add_set_aside();

  // A backward that throws (broken_backward.cpp)
  void note_backward();
  void end_backward();
  bool backward_threw() const;
  void require_all_threw() const;
  void complete_pass();
  void drop_gradients();

  // Unused parameters (unused_parameters.cpp)
  std::vector<bool> find_reachable(const std::vector<at::Tensor>& outputs) const;
  bool reads_used_map() const;
  void launch_used_map();
  std::vector<bool> globally_used();

  // Statistics (reducer_statistics.cpp)
  void decide_measurement();
  void collect_statistics();
  DdpLoggingData logging_data();

  bool scales_after_sum() const;
  at::Device device() const { return communicator->device(); }

  CommunicatorPtr communicator;
  const std::shared_ptr<int> lifetime = std::make_shared<int>();  // ends with this
  DdpOptions options;
  std::shared_ptr<CommHook> hook;
  bool hooks_compared = false;
  std::vector<Parameter> parameters;
  NamedParameters named_parameters;
  std::unordered_map<torch::autograd::Node*, int> accumulator_index;
  std::vector<ParameterSpec> specs;
  std::vector<at::Tensor> arenas;  // one a key
  BucketLayout layout;
  std::vector<BucketState> buckets;
  std::vector<std::function<void(const BucketLayout&, const BucketLayout&)>> layout_listeners;
  bool shards = false;  // a rank reduces its part of each bucket only
  detail::BufferBroadcast buffer_broadcast;
  bool buffers_sent = false;  // for the next training forward

  mutable std::mutex mutex;
  detail::BucketScheduler scheduler;
  LaunchSequencer::ModelId model_id;
  std::optional<c10::Stream> launch_stream;  // see stream_behind_gradients
  bool launched_beside = false;              // on it, in this pass
  bool expects_sync = false;   // a synchronised forward ran and its backward has not ended
  bool local_forward = false;  // one of no_sync() ran since the last synchronised one
  bool warned_unannounced = false;
  bool unused_marked = false;  // in this pass
  bool end_queued = false;     // the static graph's counting pass: its end is on the engine
  int local_end_task = -1;     // the engine's task whose end attaches unsynchronised gradients
  std::vector<int> running_backwards;  // the engine's tasks of the pass that have not ended
  struct OpenForward {
    std::weak_ptr<ForwardState> state;  // expires with the forward's graph
    std::vector<bool> reachable;        // find_unused_parameters
  };
  std::vector<OpenForward> open_forwards;
  int untracked_forwards = 0;  // synchronised ones whose outputs are not known
  bool forward_since_pass = false;
  bool refuses_second = false;  // an open forward is left, and its backward cannot be reduced
  bool requires_weight = false;
  int64_t num_passes = 0;        // synchronised backwards that ended
  int64_t num_local_passes = 0;  // those under no_sync
  bool has_rebuilt = false;
  std::vector<bool> static_used;  // static_graph: used on any rank, known from the first pass
  std::vector<bool> reachable;    // from the outputs of the pending forwards
  std::vector<int> ready_order;
  std::vector<int> previous_ready_order;

  double divisor = 0;        // 0: the world size
  double weight = 0;         // counts of weighted_backward since the last synchronised one
  at::Tensor device_weight;  // float32 [1]: those that the device alone knows; undefined: none
  std::optional<c10::Stream> weight_stream;  // where it was made
  bool is_weighted = false;
  at::Tensor weight_sum;  // float32 [1] on the device, reduced with the first bucket
  WorkPtr weight_work;
  at::Tensor used_map;  // int32 [num_parameters]
  WorkPtr used_work;

  detail::TimeMark forward_start, backward_start, compute_end, comm_start, wait_end;
  detail::TimeMark exposed_begin, exposed_end;  // of every pass, replayed ones too
  bool takes_host_time = false;                 // the running pass, for ddp.bucket_cap_mb=auto
  bool takes_ready_times = false;
  bool damaged_buckets_told = false;
  std::chrono::steady_clock::time_point host_begin;
  double host_backward_ms = 0;
  detail::TimeMark ready_begin;
  std::vector<detail::TimeMark> ready_times;  // by parameter
  TraceSpan backward_trace;                   // from the first gradient on
  struct Sums {
    int64_t count = 0;
    double forward = 0, backward = 0, comm = 0, overlap = 0;
  } sums;
  bool is_measured = false;          // the running pass
  bool measurement_decided = false;  // for the running pass
  bool statistics_pending = false;   // the marks of a pass wait to be read
  std::vector<bool> previous_unused;
  bool unused_set_changed = false;
  std::vector<int64_t> initial_bucket_bytes;
};

}  // namespace ddp
