// SPDX-License-Identifier: Apache-2.0
#include "ddp/comm/context.hpp"

namespace ddp {

void describe_fields(CommunicatorOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "backend",
                 .doc = "Communication backend: nccl on GPUs, mpi on CPUs, single for one rank."},
                options.backend,
                {{"auto", CommBackend::Auto},
                 {"nccl", CommBackend::Nccl},
                 {"mpi", CommBackend::Mpi},
                 {"single", CommBackend::Single}});
  visitor.field({.name = "timeout_ms", .doc = "Time limit of a collective.", .min = 1},
                options.timeout);
  visitor.field({.name = "first_step_timeout_ms",
                 .doc = "Time limit of a collective until the first step has ended.",
                 .min = 1},
                options.first_step_timeout);
  visitor.field({.name = "nccl_min_ctas",
                 .doc = "Fewest thread blocks of a NCCL kernel. 0: NCCL's choice.",
                 .min = 0,
                 .max = 64},
                options.nccl_min_ctas);
  visitor.field({.name = "nccl_max_ctas",
                 .doc = "Most thread blocks of a NCCL kernel. 0: NCCL's choice. With 1 to 24, "
                        "libddp's cooperative kernels (BatchNorm of small images) use that "
                        "many multiprocessors fewer, so that they can run during a reduction. "
                        "Their sums are then added in another order than on one GPU, so last "
                        "bits differ.",
                 .min = 0,
                 .max = 64},
                options.nccl_max_ctas);
  visitor.field({.name = "check_collectives",
                 .doc = "For debugging: compare the arguments of each collective across ranks "
                        "before it starts. A difference is an error that names both sides."},
                options.check_collectives);
}

void describe_fields(ControlPlaneOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "rendezvous_timeout_ms",
                 .doc = "Time limit for all ranks to connect at the start.",
                 .min = 1},
                options.rendezvous_timeout);
  visitor.field({.name = "heartbeat_interval_ms", .doc = "Time between heartbeats.", .min = 10},
                options.heartbeat_interval);
  visitor.field({.name = "heartbeat_misses",
                 .doc = "Missed heartbeats before a rank is considered lost.",
                 .min = 1,
                 .max = 1000},
                options.heartbeat_misses);
  visitor.field({.name = "collective_timeout_ms",
                 .doc = "Time limit of a collective of the control plane.",
                 .min = 1},
                options.collective_timeout);
  visitor.field({.name = "bind_address",
                 .doc = "Address on which rank 0 listens. Empty: one that its peers can reach.",
                 .may_differ = true},
                options.bind_address);
  visitor.field({.name = "rendezvous_folder",
                 .doc = "Folder shared by all nodes through which ranks exchange the secret. Used "
                        "by srun without MPI (empty: $SLURM_SUBMIT_DIR, else $HOME) and by "
                        "torchrun (empty: /tmp on one host).",
                 .may_differ = true},
                options.rendezvous_folder);
}

void describe_fields(ContextOptions& options, FieldVisitor& visitor) {
  visitor.field(
      {.name = "device",
       .doc =
           "Device to train on. auto: a GPU if one answers, else the CPU. It is an error if GPUs "
           "were given to this process (by Slurm or CUDA_VISIBLE_DEVICES) and none answers.",
       .common = true},
      options.device,
      {{"auto", DeviceChoice::Auto}, {"cpu", DeviceChoice::Cpu}, {"cuda", DeviceChoice::Cuda}});
  visitor.field({.name = "seed",
                 .doc = "Seed for initial weights, dropout and noise; equal on all ranks.",
                 .min = 0},
                options.seed);
  visitor.field({.name = "plan_file",
                 .doc = "File that stores measured choices (all-reduce times, buckets, "
                        "algorithms) for the next run on the same hardware. Empty: only "
                        "checkpoints store them.",
                 .may_differ = true},
                options.plan_file);
  visitor.section("communicator", options.communicator);
  visitor.section("control_plane", options.control_plane);
}

}  // namespace ddp
