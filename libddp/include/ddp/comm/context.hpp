// SPDX-License-Identifier: Apache-2.0
// The job as one rank sees it. The Context owns the control plane and the communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/fields.hpp"

namespace ddp {

struct LaunchEnvironment;
namespace detail {
class ContextHandle;
}

/// Auto: a GPU if one is visible.
enum class DeviceChoice { Auto, Cpu, Cuda };

struct ContextOptions {
  DeviceChoice device = DeviceChoice::Auto;
  CommunicatorOptions communicator{};
  ControlPlaneOptions control_plane{};
  LaunchArguments launch;  ///< not settings: for programs with a launcher of their own
  /// Seeds the default generators of all ranks equally; see DdpOptions::seed_ranks.
  int64_t seed = 0;
  /// Rank 0 reads this file at the start and writes it after choices were measured; empty: none.
  std::string plan_file;
};
void describe_fields(ContextOptions& options, FieldVisitor& visitor);
void describe_fields(CommunicatorOptions& options, FieldVisitor& visitor);
void describe_fields(ControlPlaneOptions& options, FieldVisitor& visitor);

class Context {
 public:
  /// Joins the job. Collective. Sets the current CUDA device and a non-default stream: CUDA graphs
  /// cannot capture the default stream, and gradients are accumulated on the stream that was
  /// current when the parameter was first used. Seeds all generators with `seed` on every rank.
  static Context create(const ContextOptions& options = {});
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  /// Calls close(). If an exception unwinds, aborts the communicators instead and does not wait for
  /// other ranks. Only ddp::run sends them the exception's message.
  ~Context();

  const Membership& membership() const;         ///< of the ranks that met
  int rank() const;                             ///< in the job, 0 … world_size - 1
  int world_size() const;                       ///< number of ranks of the job
  int local_rank() const;                       ///< on this node; chooses the GPU
  int local_world_size() const;                 ///< ranks on this node
  int node_rank() const;                        ///< of this node, 0 … num_nodes - 1
  int num_nodes() const;                        ///< nodes of the job
  bool is_main() const { return rank() == 0; }  ///< is this rank 0?
  at::Device device() const;                    ///< of this rank: a GPU or the CPU
  const char* launcher() const;                 ///< for messages: "torchrun", "a Slurm step", …
  const LaunchEnvironment& launch() const;      ///< internal
  CommunicatorPtr communicator() const;         ///< of all ranks of the job
  ControlPlane& control_plane() const;          ///< lives as long as the Context

  /// Shows this rank's step and place in log lines and to peers (ControlPlane::set_progress).
  void set_progress(int64_t step, const std::string& where) const;

  /// close() runs `teardown` before the communicators close, in reverse order of registration.
  void add_teardown(std::function<void()> teardown);
  /// Ordered, collective end: teardowns, communicators, control plane. Idempotent.
  void close();

 private:
  friend class detail::ContextHandle;
  struct State;
  explicit Context(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ddp
