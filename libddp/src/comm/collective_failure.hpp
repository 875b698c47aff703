// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace ddp::detail {

/// A collective that failed by itself on this rank: late, or refused by MPI or NCCL.
struct CollectiveFailure {
  std::string collective;  ///< "all_reduce #7 (…) of the mpi communicator, rank 1 of 4"
  int64_t step = 0;        ///< as Communicator::set_step said
  std::exception_ptr error;
};

/// Told once, on the thread that noticed; not told of aborts. The communicator is aborted already.
using CollectiveFailureHandler = std::function<void(const CollectiveFailure&)>;

/// what() of `error`.
std::string message_of(const std::exception_ptr& error);

}  // namespace ddp::detail
