// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_collectives.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

// The messages of an exchange never match a program's send() or recv().
constexpr int kSendTag = 0;
constexpr int kExchangeTag = 1;

float smaller(float a, float b) {
  return b < a ? b : a;
}
float larger(float a, float b) {
  return b > a ? b : a;
}
float sum(float a, float b) {
  return a + b;
}
float product(float a, float b) {
  return a * b;
}

template <typename T, float (*Op)(float, float)>
void reduce_pairs(void* in, void* in_out, int* length, MPI_Datatype*) {
  const auto* a = static_cast<const T*>(in);
  auto* b = static_cast<T*>(in_out);
  for (int i = 0; i < *length; ++i) {
    b[i] = static_cast<T>(Op(static_cast<float>(a[i]), static_cast<float>(b[i])));
  }
}

template <typename T>
void create_ops(MPI_Op* ops) {
  for (auto* function : {reduce_pairs<T, sum>, reduce_pairs<T, smaller>, reduce_pairs<T, larger>,
                         reduce_pairs<T, product>}) {
    check_mpi(MPI_Op_create(function, /*commute=*/1, ops++), "MPI_Op_create");
  }
}

int index_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return 0;
    case ReduceOp::Min:
      return 1;
    case ReduceOp::Max:
      return 2;
    case ReduceOp::Product:
      return 3;
  }
  throw InternalError("unknown ReduceOp");
}

template <typename T, typename Math>
void divide_typed(void* data, int64_t num_elements, int divisor) {
  auto* values = static_cast<T*>(data);
  const auto by = static_cast<Math>(divisor);
  for (int64_t i = 0; i < num_elements; ++i) {
    values[i] = static_cast<T>(static_cast<Math>(values[i]) / by);
  }
}

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

MpiReduceOps::MpiReduceOps() {
  create_ops<c10::Half>(half_);
  create_ops<c10::BFloat16>(bfloat16_);
}

MPI_Datatype MpiReduceOps::datatype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return MPI_FLOAT;
    case c10::kDouble:
      return MPI_DOUBLE;
    case c10::kHalf:
    case c10::kBFloat16:
      return MPI_UINT16_T;
    case c10::kChar:
      return MPI_INT8_T;
    case c10::kShort:
      return MPI_INT16_T;
    case c10::kInt:
      return MPI_INT32_T;
    case c10::kLong:
      return MPI_INT64_T;
    case c10::kByte:
    case c10::kBool:
      return MPI_UINT8_T;
    default:
      throw InternalError("a dtype without an MPI datatype passed the argument checks");
  }
}

MPI_Op MpiReduceOps::op(c10::ScalarType dtype, ReduceOp op) const {
  const int index = index_of(op);
  if (dtype == c10::kHalf) {
    return half_[index];
  }
  if (dtype == c10::kBFloat16) {
    return bfloat16_[index];
  }
  if (dtype == c10::kBool) {
    return op == ReduceOp::Sum || op == ReduceOp::Max ? MPI_LOR : MPI_LAND;
  }
  switch (op) {
    case ReduceOp::Min:
      return MPI_MIN;
    case ReduceOp::Max:
      return MPI_MAX;
    case ReduceOp::Product:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

void divide_by(void* data, int64_t num_elements, c10::ScalarType dtype, int divisor) {
  switch (dtype) {
    case c10::kFloat:
      return divide_typed<float, float>(data, num_elements, divisor);
    case c10::kDouble:
      return divide_typed<double, double>(data, num_elements, divisor);
    case c10::kHalf:
      return divide_typed<c10::Half, float>(data, num_elements, divisor);
    case c10::kBFloat16:
      return divide_typed<c10::BFloat16, float>(data, num_elements, divisor);
    default:
      throw InternalError("avg of a dtype that is not floating passed the argument checks");
  }
}

void launch_all_reduce(const MpiGroup& group, const MpiSpan& span, ReduceOp op,
                       MpiRequests& requests) {
  const auto mpi_op = group.reduce_ops().op(span.dtype, op);
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, span.at(offset), count, span.datatype, mpi_op,
                             group.comm, &requests.emplace_back()),
              "MPI_Iallreduce");
  });
}

void launch_broadcast(const MpiGroup& group, const MpiSpan& span, int root, MpiRequests& requests) {
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    check_mpi(MPI_Ibcast(span.at(offset), count, span.datatype, root, group.comm,
                         &requests.emplace_back()),
              "MPI_Ibcast");
  });
}

void launch_reduce_scatter(const MpiGroup& group, const MpiSpan& output, const MpiSpan& input,
                           ReduceOp op, MpiRequests& requests) {
  const auto mpi_op = group.reduce_ops().op(input.dtype, op);
  const auto part = output.num_elements;
  if (input.num_elements <= group.max_count) {
    check_mpi(
        MPI_Ireduce_scatter_block(input.data, output.data, static_cast<int>(part), input.datatype,
                                  mpi_op, group.comm, &requests.emplace_back()),
        "MPI_Ireduce_scatter_block");
    return;
  }
  // Longer inputs use one reduction per root, because derived datatypes cannot be reduced.
  for (int root = 0; root < group.membership.world_size; ++root) {
    for_each_piece(part, group.max_count, [&](int64_t offset, int count) {
      check_mpi(MPI_Ireduce(input.at(root * part + offset), output.at(offset), count,
                            input.datatype, mpi_op, root, group.comm, &requests.emplace_back()),
                "MPI_Ireduce");
    });
  }
}

void launch_all_gather(const MpiGroup& group, const MpiSpan& output, const MpiSpan& input,
                       bool in_place, MpiRequests& requests) {
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

void launch_reduce(const MpiGroup& group, const MpiSpan& span, int root, ReduceOp op,
                   MpiRequests& requests) {
  const auto mpi_op = group.reduce_ops().op(span.dtype, op);
  const bool receives = group.membership.rank == root;
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    check_mpi(
        MPI_Ireduce(receives ? MPI_IN_PLACE : span.at(offset), receives ? span.at(offset) : nullptr,
                    count, span.datatype, mpi_op, root, group.comm, &requests.emplace_back()),
        "MPI_Ireduce");
  });
}

void launch_exchange(const MpiGroup& group, const Exchange& exchange, MpiRequests& requests) {
  const int rank = group.membership.rank;
  const int world_size = group.membership.world_size;
  const auto element_size = static_cast<int64_t>(exchange.any_tensor().element_size());
  const auto datatype = MpiReduceOps::datatype(exchange.any_tensor().scalar_type());
  // Each rank begins with its neighbour, so that they do not all send to rank 0 first. Parts whose
  // sizes the caller gave are also sent if they are empty: a receiver that expects another size
  // notices it in this call.
  for (int i = 1; i < world_size; ++i) {
    const int source = (rank + world_size - i) % world_size;
    const auto size = exchange.received[static_cast<size_t>(source)].size;
    if (size > 0 || exchange.uneven) {
      for_each_piece(size, group.max_count, [&](int64_t offset, int count) {
        requests.receive(exchange.output_at(source) + offset * element_size, count, datatype,
                         source, kExchangeTag, group.comm);
      });
    }
  }
  for (int i = 1; i < world_size; ++i) {
    const int destination = (rank + i) % world_size;
    const auto size = exchange.sent[static_cast<size_t>(destination)].size;
    if (size > 0 || exchange.uneven) {
      for_each_piece(size, group.max_count, [&](int64_t offset, int count) {
        check_mpi(MPI_Isend(exchange.input_at(destination) + offset * element_size, count, datatype,
                            destination, kExchangeTag, group.comm, &requests.emplace_back()),
                  "MPI_Isend");
      });
    }
  }
  if (exchange.copies_own_part(rank)) {
    const auto size = exchange.received[static_cast<size_t>(rank)].size;
    std::memcpy(exchange.output_at(rank), exchange.input_at(rank),
                static_cast<size_t>(size * element_size));
  }
}

void launch_send(const MpiGroup& group, const MpiSpan& span, int destination,
                 MpiRequests& requests) {
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    check_mpi(MPI_Isend(span.at(offset), count, span.datatype, destination, kSendTag, group.comm,
                        &requests.emplace_back()),
              "MPI_Isend");
  });
}

void launch_recv(const MpiGroup& group, const MpiSpan& span, int source, MpiRequests& requests) {
  for_each_piece(span.num_elements, group.max_count, [&](int64_t offset, int count) {
    requests.receive(span.at(offset), count, span.datatype, source, kSendTag, group.comm);
  });
}

}  // namespace ddp::detail
