// SPDX-License-Identifier: Apache-2.0
#include "comm/argument_checks.hpp"

#include <algorithm>
#include <numeric>
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
  check_any_strides(group, operation, name, tensor);
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

void check_same_dtype(const char* operation, const char* name, const at::Tensor& tensor,
                      const char* other_name, const at::Tensor& other) {
  if (tensor.scalar_type() != other.scalar_type()) {
    refuse(operation, name, " has dtype ", tensor.scalar_type(), ", but ", other_name, " has ",
           other.scalar_type(), "; both must be equal");
  }
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_b < begin_a + a.nbytes() && begin_a < begin_b + b.nbytes();
}

// `part` is this rank's own part, at `offset` bytes of `whole`, or lies elsewhere.
void check_place(const char* operation, const char* whole_name, const at::Tensor& whole,
                 const char* part_name, const at::Tensor& part, int64_t offset) {
  const auto place = static_cast<const char*>(part.const_data_ptr()) -
                     static_cast<const char*>(whole.const_data_ptr());
  if (overlap(whole, part) && place != offset) {
    refuse(operation, part_name, " overlaps ", whole_name, " in memory at byte ", place,
           "; in place it must be this rank's own part, at byte ", offset);
  }
}

// `whole` holds one part per rank.
void check_parts(const Communicator& group, const char* operation, const char* whole_name,
                 const at::Tensor& whole, const char* part_name, const at::Tensor& part) {
  check_tensor(group, operation, whole_name, whole);
  check_tensor(group, operation, part_name, part);
  check_same_dtype(operation, whole_name, whole, part_name, part);
  if (whole.numel() != part.numel() * group.world_size()) {
    refuse(operation, whole_name, " has ", whole.numel(), " elements, but needs ",
           group.world_size(), " (ranks) x ", part.numel(), " (elements of ", part_name,
           ") = ", part.numel() * group.world_size());
  }
  check_place(operation, whole_name, whole, part_name, part,
              group.rank() * static_cast<int64_t>(part.nbytes()));
}

void check_has_rows(const Communicator& group, const char* operation, const char* name,
                    const at::Tensor& tensor) {
  check_tensor(group, operation, name, tensor);
  if (tensor.dim() == 0 || !tensor.is_contiguous()) {
    refuse(operation, name, " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
           " has no contiguous rows; fix: use tensor.contiguous() with one dimension or more");
  }
}

// `tensor` has `sizes[r]` rows for rank r.
void check_rows(const Communicator& group, const char* operation, const char* name,
                const at::Tensor& tensor, const char* sizes_name, at::IntArrayRef sizes) {
  check_has_rows(group, operation, name, tensor);
  check_sizes(group, operation, sizes_name, sizes);
  const auto sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (sum != tensor.size(0)) {
    refuse(operation, name, " has ", tensor.size(0), " rows, but ", sizes_name, "=", sizes,
           " has the sum ", sum);
  }
}

void check_same_rows(const char* operation, const at::Tensor& output, const at::Tensor& input) {
  check_same_dtype(operation, "output", output, "input", input);
  if (row_elements(output) != row_elements(input)) {
    refuse(operation, "output has rows of ", row_elements(output), " elements, but input of ",
           row_elements(input), "; both must be equal");
  }
}

}  // namespace

void check_any_strides(const Communicator& group, const char* operation, const char* name,
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
}

void check_sizes(const Communicator& group, const char* operation, const char* name,
                 at::IntArrayRef sizes) {
  if (static_cast<int64_t>(sizes.size()) != group.world_size()) {
    refuse(operation, name, " has ", sizes.size(), " entries, but the group has ",
           group.world_size(), " ranks");
  }
  if (std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; })) {
    refuse(operation, name, "=", sizes, " has a negative entry; allowed are 0 or more");
  }
}

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

void check_reduce(const Communicator& group, const at::Tensor& tensor, int root, ReduceOp op) {
  check_tensor(group, "reduce", "tensor", tensor);
  check_op("reduce", tensor, op);
  check_rank(group, "reduce", "root", root);
}

void check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                      at::IntArrayRef sizes) {
  check_rows(group, "all_gather", "output", output, "sizes", sizes);
  check_has_rows(group, "all_gather", "input", input);
  const auto rank = static_cast<size_t>(group.rank());
  if (input.size(0) != sizes[rank]) {
    refuse("all_gather", "input has ", input.size(0),
           " rows, but this rank's entry of sizes=", sizes, " is ", sizes[rank]);
  }
  check_same_rows("all_gather", output, input);
  const auto before = std::accumulate(sizes.begin(), sizes.begin() + group.rank(), int64_t{0});
  check_place("all_gather", "output", output, "input", input,
              before * row_elements(output) * static_cast<int64_t>(output.element_size()));
}

void check_all_to_all(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                      at::IntArrayRef output_sizes, at::IntArrayRef input_sizes) {
  if (output_sizes.empty() != input_sizes.empty()) {
    refuse("all_to_all", "output_sizes=", output_sizes, " and input_sizes=", input_sizes,
           "; fix: give both or none");
  }
  if (output_sizes.empty()) {
    check_tensor(group, "all_to_all", "output", output);
    check_tensor(group, "all_to_all", "input", input);
    check_same_dtype("all_to_all", "output", output, "input", input);
    if (output.numel() != input.numel() || input.numel() % group.world_size() != 0) {
      refuse("all_to_all", "input has ", input.numel(), " elements and output ", output.numel(),
             "; both must have the same multiple of ", group.world_size(),
             ", the number of ranks; fix: give sizes for unequal parts");
    }
  } else {
    check_rows(group, "all_to_all", "output", output, "output_sizes", output_sizes);
    check_rows(group, "all_to_all", "input", input, "input_sizes", input_sizes);
    check_same_rows("all_to_all", output, input);
    const auto rank = static_cast<size_t>(group.rank());
    if (output_sizes[rank] != input_sizes[rank]) {
      refuse("all_to_all", "this rank sends itself ", input_sizes[rank], " rows, but expects ",
             output_sizes[rank]);
    }
  }
  if (overlap(output, input)) {
    refuse("all_to_all", "output overlaps input in memory; fix: give another output");
  }
}

void check_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                  int root) {
  check_rank(group, "gather", "root", root);
  if (group.rank() == root) {
    check_parts(group, "gather", "output", output, "input", input);
  } else {
    check_tensor(group, "gather", "input", input);
  }
}

void check_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                   int root) {
  check_rank(group, "scatter", "root", root);
  if (group.rank() == root) {
    check_parts(group, "scatter", "input", input, "output", output);
  } else {
    check_tensor(group, "scatter", "output", output);
  }
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

int64_t row_elements(const at::Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(1));
}

bool is_own_part(const at::Tensor& whole, const at::Tensor& part, int rank) {
  return static_cast<const char*>(part.const_data_ptr()) ==
         static_cast<const char*>(whole.const_data_ptr()) +
             rank * static_cast<int64_t>(part.nbytes());
}

}  // namespace ddp::detail
