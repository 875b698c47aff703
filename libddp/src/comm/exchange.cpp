// SPDX-License-Identifier: Apache-2.0
#include "comm/exchange.hpp"

#include "comm/argument_checks.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Parts = std::vector<ExchangePart>;

Parts parts_of_rows(at::IntArrayRef sizes, int64_t elements_per_row) {
  Parts parts;
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    parts.push_back({offset, size * elements_per_row});
    offset += parts.back().size;
  }
  return parts;
}

Parts equal_parts(const Communicator& group, int64_t size) {
  Parts parts;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    parts.push_back({rank * size, size});
  }
  return parts;
}

Parts no_parts(const Communicator& group) {
  return Parts(static_cast<size_t>(group.world_size()));
}

Parts only_with(const Communicator& group, int rank, int64_t size) {
  auto parts = no_parts(group);
  parts[static_cast<size_t>(rank)] = {0, size};
  return parts;
}

}  // namespace

char* Exchange::output_at(int rank) const {
  return static_cast<char*>(output.data_ptr()) +
         received[static_cast<size_t>(rank)].offset * static_cast<int64_t>(output.element_size());
}

const char* Exchange::input_at(int rank) const {
  return static_cast<const char*>(input.const_data_ptr()) +
         sent[static_cast<size_t>(rank)].offset * static_cast<int64_t>(input.element_size());
}

bool Exchange::copies_own_part(int rank) const {
  return received[static_cast<size_t>(rank)].size > 0 && output_at(rank) != input_at(rank);
}

Exchange all_gather_exchange(const Communicator& group, const at::Tensor& output,
                             const at::Tensor& input, at::IntArrayRef sizes) {
  check_all_gather(group, output, input, sizes);
  return {.name = "all_gather",
          .output = output,
          .input = input,
          .received = parts_of_rows(sizes, row_elements(output)),
          .sent = Parts(sizes.size(), ExchangePart{0, input.numel()}),
          .described = output,
          .uneven = true};
}

Exchange all_to_all_exchange(const Communicator& group, const at::Tensor& output,
                             const at::Tensor& input, at::IntArrayRef output_sizes,
                             at::IntArrayRef input_sizes) {
  check_all_to_all(group, output, input, output_sizes, input_sizes);
  Exchange exchange{.name = "all_to_all", .output = output, .input = input};
  if (output_sizes.empty()) {
    exchange.sent = equal_parts(group, input.numel() / group.world_size());
    exchange.received = exchange.sent;
    exchange.described = input;
  } else {
    exchange.sent = parts_of_rows(input_sizes, row_elements(input));
    exchange.received = parts_of_rows(output_sizes, row_elements(output));
    exchange.uneven = true;
  }
  return exchange;
}

Exchange gather_exchange(const Communicator& group, const at::Tensor& output,
                         const at::Tensor& input, int root) {
  check_gather(group, output, input, root);
  const bool receives = group.rank() == root;
  return {.name = "gather",
          .output = receives ? output : at::Tensor(),
          .input = input,
          .received = receives ? equal_parts(group, input.numel()) : no_parts(group),
          .sent = only_with(group, root, input.numel()),
          .described = input,
          .root = root};
}

Exchange scatter_exchange(const Communicator& group, const at::Tensor& output,
                          const at::Tensor& input, int root) {
  check_scatter(group, output, input, root);
  const bool sends = group.rank() == root;
  return {.name = "scatter",
          .output = output,
          .input = sends ? input : at::Tensor(),
          .received = only_with(group, root, output.numel()),
          .sent = sends ? equal_parts(group, output.numel()) : no_parts(group),
          .described = output,
          .root = root};
}

std::string describe_parts(const Exchange& exchange) {
  return concat(exchange.described.defined() ? concat(exchange.described.numel(), " ") : "",
                c10::toString(exchange.any_tensor().scalar_type()),
                exchange.root ? concat(", root ", *exchange.root) : "",
                exchange.uneven ? ", uneven" : "");
}

std::optional<ExchangeSizes> sizes_to_compare(const Exchange& exchange, int rank) {
  if (!exchange.uneven) {
    return std::nullopt;
  }
  ExchangeSizes sizes{.rank = rank};
  for (const auto& part : exchange.sent) {
    sizes.sent.push_back(part.size);
  }
  for (const auto& part : exchange.received) {
    sizes.expected.push_back(part.size);
  }
  return sizes;
}

}  // namespace ddp::detail
