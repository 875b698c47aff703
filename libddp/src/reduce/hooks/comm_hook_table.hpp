// SPDX-License-Identifier: Apache-2.0
// The communication hooks that ddp.comm_hook can name.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/options.hpp"

namespace ddp::detail {

/// Divides by the divisor, then sums: PyTorch's default_hooks.allreduce_hook.
std::shared_ptr<CommHook> make_all_reduce_hook();
/// Casts to `wire_dtype` (kHalf or kBFloat16), divides, sums, casts back, as PyTorch's hooks.
std::shared_ptr<CommHook> make_compress_hook(at::ScalarType wire_dtype);

struct PowerSgdOptions {
  int64_t rank = 1;                 ///< rank of each matrix's approximation
  int64_t start_step = 1000;        ///< backwards with a plain all-reduce before compression starts
  double min_compression_rate = 2;  ///< matrices that shrink no more than this are sent in full
  uint64_t seed = 0;                ///< seed of the first Q; equal on all ranks
};
/// Low-rank compression with error feedback and warm start (Vogels et al., 2019, algorithm 2).
std::shared_ptr<CommHook> make_powersgd_hook(const PowerSgdOptions& options);

/// The values of ddp.comm_hook and their names. "none" comes first.
std::vector<std::pair<std::string, CommHookType>> comm_hook_names();

/// nullptr for None: the reducer itself all-reduces.
std::shared_ptr<CommHook> make_comm_hook(const DdpOptions& options);

}  // namespace ddp::detail
