// SPDX-License-Identifier: Apache-2.0
#include "ddp/reduce/options.hpp"

#include "ddp/core/error.hpp"
#include "reduce/buckets/gradient_arena.hpp"
#include "reduce/hooks/comm_hook_table.hpp"

namespace ddp {
namespace {

constexpr double kBytesPerMib = 1024.0 * 1024.0;
constexpr double kDefaultBucketCapMb = 25;
constexpr double kDefaultFirstBucketMb = 1;

void describe_hooks(DdpOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "comm_hook",
                 .doc = "How a bucket is reduced. none: all-reduce in the gradients' dtype."},
                options.comm_hook, detail::comm_hook_names());
  visitor.field({.name = "powersgd_rank", .doc = "Rank of PowerSGD's approximation.", .min = 1},
                options.powersgd_rank);
  visitor.field({.name = "powersgd_start_step",
                 .doc = "Steps reduced in full before PowerSGD begins.",
                 .unit = "steps",
                 .min = 0},
                options.powersgd_start_step);
}

void describe_checks(DdpOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "desync_check_every",
                 .doc = "Steps of the optimizer between comparisons of parameters and optimizer "
                        "state across ranks, by hashes. 0: never.",
                 .unit = "steps",
                 .min = 0},
                options.desync_check_every);
  visitor.field({.name = "desync_policy",
                 .doc = "Action if ranks differ. error: end the run with 70. warn: log and go on. "
                        "repair: copy from the majority of 3 or more ranks."},
                options.desync_policy,
                {{"error", DesyncPolicy::Error},
                 {"warn", DesyncPolicy::Warn},
                 {"repair", DesyncPolicy::Repair}});
}

}  // namespace

void describe_fields(DdpOptions& options, FieldVisitor& visitor) {
  visitor.field({.name = "bucket_cap_mb",
                 .doc = "Size of gradient buckets. auto: buckets that leave the least "
                        "communication after backward, chosen from times of the first "
                        "backwards.",
                 .unit = "MiB",
                 .min = 1e-6,
                 .max = 1 << 20},
                options.bucket_cap_mb);
  visitor.field({.name = "first_bucket_mb",
                 .doc = "Size of the first bucket. 0: 1 MiB if bucket_cap_mb has its default, "
                        "else bucket_cap_mb.",
                 .unit = "MiB",
                 .min = 0,
                 .max = 1 << 20},
                options.first_bucket_mb);
  visitor.field({.name = "find_unused_parameters",
                 .doc = "Allow parameters to get no gradient in some steps."},
                options.find_unused_parameters);
  visitor.field({.name = "static_graph",
                 .doc = "Every step uses the same parameters the same number of times."},
                options.static_graph);
  visitor.field(
      {.name = "broadcast_buffers", .doc = "When rank 0's buffers are sent to the other ranks."},
      options.broadcast_buffers,
      {{"each_forward", BroadcastBuffers::EachForward},
       {"before_eval", BroadcastBuffers::BeforeEval},
       {"off", BroadcastBuffers::Off}});
  visitor.field({.name = "init_sync",
                 .doc = "Send rank 0's parameters and buffers at construction. Their names and "
                        "shapes are compared either way. If false, make all models before you "
                        "wrap the first."},
                options.init_sync);
  visitor.field({.name = "seed_ranks",
                 .doc = "After wrapping, each rank of the model's communicator draws its own "
                        "random numbers, for example for dropout. false: ranks that were seeded "
                        "equally draw the same numbers."},
                options.seed_ranks);
  visitor.field({.name = "parameters_to_ignore",
                 .doc = "Names of parameters and buffers excluded from synchronization."},
                options.parameters_to_ignore);
  describe_hooks(options, visitor);
  visitor.field({.name = "fp32_grads",
                 .doc = "Keep and reduce the gradients of bf16 and fp16 parameters in float32."},
                options.fp32_grads);
  visitor.field(
      {.name = "sparse",
       .doc = "Sparse gradients of embeddings. gather: the rows of all ranks are gathered "
              "and averaged. refuse: they are an error."},
      options.sparse, {{"refuse", SparseGradients::Refuse}, {"gather", SparseGradients::Gather}});
  describe_checks(options, visitor);
}

std::vector<int64_t> bucket_limits_bytes(const DdpOptions& options) {
  // auto uses the default if nothing can be measured.
  const double cap = options.bucket_cap_mb.value_or(kDefaultBucketCapMb);
  if (!(cap > 0)) {
    throw SettingsError(
        concat("ddp.bucket_cap_mb=", cap, " must be more than 0; fix: use kAutoBuckets for auto"));
  }
  const double first = options.first_bucket_mb > 0  ? options.first_bucket_mb
                       : cap == kDefaultBucketCapMb ? kDefaultFirstBucketMb
                                                    : cap;
  return {static_cast<int64_t>(first * kBytesPerMib), static_cast<int64_t>(cap * kBytesPerMib)};
}

}  // namespace ddp
