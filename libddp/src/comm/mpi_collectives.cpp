// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_collectives.hpp"

namespace ddp::detail {
namespace {

// A datatype of `num_elements` of `base`, for blocks whose count would not fit an int.
class BlockType {
 public:
  BlockType(int64_t num_elements, int64_t max_count, MPI_Datatype base, int64_t element_size) {
    const auto pieces = num_elements / max_count;
    const auto rest = num_elements % max_count;
    MPI_Datatype piece = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(static_cast<int>(max_count), base, &piece),
              "MPI_Type_contiguous");
    const int lengths[] = {static_cast<int>(pieces), static_cast<int>(rest)};
    const MPI_Aint offsets[] = {0, static_cast<MPI_Aint>(pieces * max_count * element_size)};
    const MPI_Datatype types[] = {piece, base};
    check_mpi(MPI_Type_create_struct(2, lengths, offsets, types, &type_), "MPI_Type_create_struct");
    check_mpi(MPI_Type_free(&piece), "MPI_Type_free");
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  BlockType(const BlockType&) = delete;
  BlockType& operator=(const BlockType&) = delete;
  ~BlockType() { MPI_Type_free(&type_); }  // MPI keeps it while operations use it
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

}  // namespace

void launch_all_reduce(const MpiGroup& group, const MpiSpan& span, ReduceOp op,
                       Requests& requests) {
  const auto mpi_op = group.reduce_ops().op(span.dtype, op);
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, span.at(offset), count, span.datatype, mpi_op,
                             group.comm, &requests.emplace_back()),
              "MPI_Iallreduce");
  });
}

void launch_broadcast(const MpiGroup& group, const MpiSpan& span, int root, Requests& requests) {
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    check_mpi(MPI_Ibcast(span.at(offset), count, span.datatype, root, group.comm,
                         &requests.emplace_back()),
              "MPI_Ibcast");
  });
}

void launch_reduce_scatter(const MpiGroup& group, const MpiSpan& output, const MpiSpan& input,
                           ReduceOp op, Requests& requests) {
  const auto mpi_op = group.reduce_ops().op(input.dtype, op);
  const auto part = output.num_elements;
  if (input.num_elements <= group.max_count) {
    check_mpi(
        MPI_Ireduce_scatter_block(input.data, output.data, static_cast<int>(part), input.datatype,
                                  mpi_op, group.comm, &requests.emplace_back()),
        "MPI_Ireduce_scatter_block");
    return;
  }
  // Longer ones use one reduction per root, since derived datatypes cannot be reduced.
  for (int root = 0; root < group.world_size; ++root) {
    for_each_piece(part, group.max_count, [&](int64_t offset, int count) {
      check_mpi(MPI_Ireduce(input.at(root * part + offset), output.at(offset), count,
                            input.datatype, mpi_op, root, group.comm, &requests.emplace_back()),
                "MPI_Ireduce");
    });
  }
}

void launch_all_gather(const MpiGroup& group, const MpiSpan& output, const MpiSpan& input,
                       bool in_place, Requests& requests) {
  const void* send = in_place ? MPI_IN_PLACE : static_cast<const void*>(input.data);
  const auto part = input.num_elements;
  const auto gather = [&](int count, MPI_Datatype type) {
    check_mpi(MPI_Iallgather(send, count, type, output.data, count, type, group.comm,
                             &requests.emplace_back()),
              "MPI_Iallgather");
  };
  if (output.num_elements <= group.max_count) {
    gather(static_cast<int>(part), input.datatype);
  } else {
    const BlockType block(part, group.max_count, input.datatype, input.element_size);
    gather(1, block.get());
  }
}

}  // namespace ddp::detail
