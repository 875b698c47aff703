// SPDX-License-Identifier: Apache-2.0
// MPI's non-blocking collectives for tensors of any length, in pieces whose counts fit. Includes
// mpi.h: only for .cpp files of this folder.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/exchange.hpp"
#include "comm/mpi/mpi_internal.hpp"
#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

// Parts of a communicator that its pending operations share. Excludes the runtime: the MPI thread
// drops the last operation and cannot end itself.
struct MpiGroup {
  std::shared_ptr<const MpiState> state;
  MPI_Comm comm = MPI_COMM_NULL;
  Membership membership;
  int64_t max_count = 0;

  const MpiReduceOps& reduce_ops() const { return *state->reduce_ops; }
};
using MpiGroupPtr = std::shared_ptr<const MpiGroup>;

// Calls `visit(offset, count)` for pieces of at most `max_count`.
template <typename Visit>
void for_each_piece(int64_t num_elements, int64_t max_count, const Visit& visit) {
  int64_t offset = 0;
  do {
    const auto count = std::min(max_count, num_elements - offset);
    visit(offset, static_cast<int>(count));
    offset += count;
  } while (offset < num_elements);
}

// A tensor's memory as MPI sees it. Built on the caller's thread, used on the MPI thread.
struct MpiSpan {
  explicit MpiSpan(const at::Tensor& t)
      : tensor(t),
        data(static_cast<char*>(t.data_ptr())),
        num_elements(t.numel()),
        element_size(static_cast<int64_t>(t.element_size())),
        dtype(t.scalar_type()),
        datatype(MpiReduceOps::datatype(dtype)) {}
  char* at(int64_t element) const { return data + element * element_size; }

  at::Tensor tensor;  // keeps the memory alive
  char* data;
  int64_t num_elements;
  int64_t element_size;
  c10::ScalarType dtype;
  MPI_Datatype datatype;
};

void launch_all_reduce(const MpiGroup& group, const MpiSpan& span, ReduceOp op,
                       MpiRequests& requests);
void launch_broadcast(const MpiGroup& group, const MpiSpan& span, int root, MpiRequests& requests);
void launch_reduce_scatter(const MpiGroup& group, const MpiSpan& output, const MpiSpan& input,
                           ReduceOp op, MpiRequests& requests);
void launch_all_gather(const MpiGroup& group, const MpiSpan& output, const MpiSpan& input,
                       bool in_place, MpiRequests& requests);
/// Root's elements are reduced in place; the other ranks' elements stay.
void launch_reduce(const MpiGroup& group, const MpiSpan& span, int root, ReduceOp op,
                   MpiRequests& requests);
void launch_exchange(const MpiGroup& group, const Exchange& exchange, MpiRequests& requests);
void launch_send(const MpiGroup& group, const MpiSpan& span, int destination,
                 MpiRequests& requests);
void launch_recv(const MpiGroup& group, const MpiSpan& span, int source, MpiRequests& requests);

}  // namespace ddp::detail
