// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace ddp::detail {

/// A collective that failed on this rank: it timed out, or MPI or NCCL returned an error.
struct CollectiveFailure {
  std::string collective;  ///< "all_reduce #7 (…) of the mpi communicator, rank 1 of 4"
  int64_t step = 0;        ///< from Communicator::set_step
  std::exception_ptr error;
};

/// Called once, on the thread that detected the failure; not called for aborts. With MPI the
/// communicator is already aborted. With NCCL it aborts when the handler returns.
using CollectiveFailureHandler = std::function<void(const CollectiveFailure&)>;

/// Returns what() of `error`.
std::string message_of(const std::exception_ptr& error);

}  // namespace ddp::detail
