// SPDX-License-Identifier: Apache-2.0
// What a rank of a job owns: its place in the job, its device, the control plane and the world
// communicator. No singletons: everything is reached through the Context, which tears down in
// order.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/fields.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp {

struct ContextOptions {
  std::string device = "auto";  ///< auto (a GPU where one is seen), cpu, cuda
  CommunicatorOptions communicator{};
  ControlPlaneOptions control_plane{};
  LaunchArguments launch;
  int64_t seed = 0;  ///< same initial weights on all ranks; see seed_ranks()
  /// Rank 0 reads it at the start and writes it where choices were measured; empty: none.
  std::string plan_file;
  /// Not a setting: set_progress calls it before `step` (>= 0) counts as begun.
  std::function<void(int64_t step)> before_step = {};
};
void describe_fields(ContextOptions& options, FieldVisitor& visitor);
void describe_fields(CommunicatorOptions& options, FieldVisitor& visitor);
void describe_fields(ControlPlaneOptions& options, FieldVisitor& visitor);

class Context {
 public:
  /// Joins the job: launch environment, control plane, device, communicator. Collective. Sets the
  /// current CUDA device and gives this thread one pool stream as its current stream, so that
  /// AccumulateGrad nodes made later live on a stream that can be captured. Seeds all generators
  /// with `seed` on every rank (equal initial weights).
  static Context create(const ContextOptions& options = {});
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  /// Closes in order: registered teardowns (newest first), communicators, control plane. While an
  /// exception unwinds, communicators abort and nothing waits for peers. Where nobody published the
  /// exception (ddp::run does), peers learn that an exception ended this rank, but not its message.
  ~Context();

  int rank() const;
  int world_size() const;
  int local_rank() const;
  int local_world_size() const;
  int node_rank() const;
  int num_nodes() const;
  bool is_main() const { return rank() == 0; }
  at::Device device() const;
  const LaunchEnvironment& launch() const;
  CommunicatorPtr communicator() const;
  ControlPlane& control_plane() const;
  /// The measured choices of this run: the world communicator's.
  Plan& plan() const { return communicator()->plan(); }

  /// From here on every rank draws differently (dropout, augmentation): seed * world_size + rank.
  void seed_ranks(int64_t seed) const;

  /// Tells peers and log lines where this rank is. Cheap: it waits for no socket, see
  /// ControlPlane::set_progress.
  void set_progress(int64_t step, const std::string& where) const;

  /// Runs `teardown` before communicators close (graphs and reducers register here).
  void add_teardown(std::function<void()> teardown);

  /// Notes a failure for the end of the job, on behalf of a destructor, which cannot throw. All
  /// ranks note the same; the first failure counts.
  void defer_failure(const FailureCause& cause) const;
  /// Publishes a failure that was noted and throws the Error of its exit code. ddp::run calls it
  /// behind the training function, close() calls it first.
  void throw_deferred_failure() const;

  /// Ordered, collective end; idempotent. The destructor calls it where no exception unwinds.
  void close();

 private:
  struct State;
  explicit Context(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ddp
