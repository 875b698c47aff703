// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/context.hpp"

namespace ddp {

void describe_fields(CommunicatorOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "backend",
                 .doc = "what reduces: nccl on GPUs, mpi on CPU, single alone",
                 .choices = {"auto", "nccl", "mpi", "single"}},
                options.backend);
  visitor.field({.name = "timeout_ms", .doc = "limit of a collective", .min = 1}, options.timeout);
  visitor.field({.name = "first_step_timeout_ms",
                 .doc = "limit of a collective until the first step ended",
                 .min = 1},
                options.first_step_timeout);
  visitor.field({.name = "nccl_min_ctas",
                 .doc = "fewest thread blocks of a NCCL kernel; 0 leaves NCCL's choice",
                 .min = 0,
                 .max = 64},
                options.nccl_min_ctas);
  visitor.field({.name = "nccl_max_ctas",
                 .doc = "most thread blocks of a NCCL kernel; 0 leaves NCCL's choice. With 24 or "
                        "fewer, kernels whose blocks wait for each other (BatchNorm of small "
                        "images) leave them room: reductions are then hidden behind small kernels "
                        "too, and the sums of such kernels are rounded otherwise than on one GPU",
                 .min = 0,
                 .max = 64},
                options.nccl_max_ctas);
  visitor.field({.name = "nccl_algorithm",
                 .doc = "of gradient reductions: ring; symmetric (windows, few thread blocks, one "
                        "node); auto measures both once and keeps the result in the plan",
                 .choices = {"auto", "ring", "symmetric"}},
                options.nccl_algorithm);
  visitor.field({.name = "check_collectives",
                 .doc = "for debugging: compares over the ranks what each collective is called "
                        "with, before it starts, and names both sides where that differs"},
                options.check_collectives);
}

void describe_fields(ControlPlaneOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "rendezvous_timeout_ms",
                 .doc = "how long ranks wait for each other at the start",
                 .min = 1},
                options.rendezvous_timeout);
  visitor.field({.name = "heartbeat_interval_ms", .doc = "time between signs of life", .min = 10},
                options.heartbeat_interval);
  visitor.field({.name = "heartbeat_misses",
                 .doc = "missing signs of life after which a rank counts as lost",
                 .min = 1,
                 .max = 1000},
                options.heartbeat_misses);
  visitor.field(
      {.name = "collective_timeout_ms", .doc = "limit of an agreement among all ranks", .min = 1},
      options.collective_timeout);
  visitor.field({.name = "bind_address",
                 .doc = "address rank 0 listens on; empty: what its peers can reach",
                 .may_differ = true},
                options.bind_address);
  visitor.field({.name = "rendezvous_folder",
                 .doc = "folder all nodes share, for ranks started by srun without MPI (empty: "
                        "$SLURM_SUBMIT_DIR, else $HOME) or by torchrun (empty: /tmp on one host)",
                 .may_differ = true},
                options.rendezvous_folder);
}

void describe_fields(ContextOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "device",
                 .doc = "where to train; auto takes a GPU where one is seen",
                 .choices = {"auto", "cpu", "cuda"}},
                options.device);
  visitor.field({.name = "seed", .doc = "of the initial weights, equal on all ranks", .min = 0},
                options.seed);
  visitor.field({.name = "plan_file",
                 .doc = "file that keeps measured choices for the next run on the same hardware; "
                        "empty: only checkpoints keep them",
                 .may_differ = true},
                options.plan_file);
  visitor.section("communicator", options.communicator);
  visitor.section("control_plane", options.control_plane);
}

}  // namespace ddp
