// SPDX-License-Identifier: Apache-2.0
#include "comm/argument_checks.hpp"

#include <string_view>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

bool is_supported(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

template <typename... Args>
[[noreturn]] void refuse(const char* operation, const Args&... args) {
  throw SettingsError(concat(operation, ": ", args...));
}

void check_tensor(const Communicator& group, const char* operation, const char* name,
                  const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(operation, name, " is an undefined tensor; fix: give a tensor with memory");
  }
  if (tensor.layout() != at::kStrided) {
    refuse(operation, name, " has layout ", tensor.layout(),
           "; only dense tensors are reduced; fix: use tensor.to_dense()");
  }
  if (tensor.device() != group.device()) {
    refuse(operation, name, " is on ", tensor.device().str(), ", but this \"", group.backend(),
           "\" communicator works on ", group.device().str(), "; fix: move the tensor there");
  }
  if (!is_supported(tensor.scalar_type())) {
    refuse(operation, name, " has dtype ", tensor.scalar_type(),
           "; allowed are float32, float64, float16, bfloat16, int8 to int64, uint8 and bool");
  }
  if (!tensor.is_non_overlapping_and_dense()) {
    refuse(operation, name, " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
           " has gaps or overlaps in memory; fix: use tensor.contiguous()");
  }
}

void check_op(const char* operation, const at::Tensor& tensor, ReduceOp op) {
  if (op == ReduceOp::Avg && !tensor.is_floating_point()) {
    refuse(operation, "avg of dtype ", tensor.scalar_type(),
           " is not defined; allowed are float32, float64, float16 and bfloat16; fix: use sum");
  }
}

void check_rank(const Communicator& group, const char* operation, const char* name, int rank) {
  if (rank < 0 || rank >= group.world_size()) {
    refuse(operation, name, "=", rank, " is outside the group; allowed are 0 to ",
           group.world_size() - 1);
  }
}

// `whole` holds one part per rank.
void check_parts(const Communicator& group, const char* operation, const char* whole_name,
                 const at::Tensor& whole, const char* part_name, const at::Tensor& part) {
  check_tensor(group, operation, whole_name, whole);
  check_tensor(group, operation, part_name, part);
  if (whole.scalar_type() != part.scalar_type()) {
    refuse(operation, whole_name, " has dtype ", whole.scalar_type(), ", but ", part_name, " has ",
           part.scalar_type(), "; both must be equal");
  }
  if (whole.numel() != part.numel() * group.world_size()) {
    refuse(operation, whole_name, " has ", whole.numel(), " elements, but needs ",
           group.world_size(), " (ranks) x ", part.numel(), " (elements of ", part_name,
           ") = ", part.numel() * group.world_size());
  }
  const auto* whole_begin = static_cast<const char*>(whole.const_data_ptr());
  const auto* part_begin = static_cast<const char*>(part.const_data_ptr());
  const auto whole_bytes = static_cast<int64_t>(whole.nbytes());
  const auto part_bytes = static_cast<int64_t>(part.nbytes());
  const bool overlaps =
      part_begin < whole_begin + whole_bytes && whole_begin < part_begin + part_bytes;
  if (overlaps && !is_own_part(whole, part, group.rank())) {
    refuse(operation, part_name, " overlaps ", whole_name, " in memory at byte ",
           part_begin - whole_begin, "; in place it must be this rank's own part, at byte ",
           group.rank() * part_bytes);
  }
}

}  // namespace

void check_all_reduce(const Communicator& group, const at::Tensor& tensor, ReduceOp op) {
  check_tensor(group, "all_reduce", "tensor", tensor);
  check_op("all_reduce", tensor, op);
}

void check_broadcast(const Communicator& group, const at::Tensor& tensor, int root) {
  check_tensor(group, "broadcast", "tensor", tensor);
  check_rank(group, "broadcast", "root", root);
}

void check_reduce_scatter(const Communicator& group, const at::Tensor& output,
                          const at::Tensor& input, ReduceOp op) {
  check_parts(group, "reduce_scatter", "input", input, "output", output);
  check_op("reduce_scatter", output, op);
}

void check_all_gather(const Communicator& group, const at::Tensor& output,
                      const at::Tensor& input) {
  check_parts(group, "all_gather", "output", output, "input", input);
}

void check_peer(const Communicator& group, const char* operation, const at::Tensor& tensor,
                int peer) {
  const bool sends = std::string_view(operation) == "send";
  check_tensor(group, operation, "tensor", tensor);
  check_rank(group, operation, sends ? "destination" : "source", peer);
  if (peer == group.rank()) {
    refuse(operation, sends ? "destination=" : "source=", peer,
           " is this rank itself; fix: name another rank");
  }
}

bool is_own_part(const at::Tensor& whole, const at::Tensor& part, int rank) {
  return static_cast<const char*>(part.const_data_ptr()) ==
         static_cast<const char*>(whole.const_data_ptr()) +
             rank * static_cast<int64_t>(part.nbytes());
}

}  // namespace ddp::detail
