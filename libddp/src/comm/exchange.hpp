// SPDX-License-Identifier: Apache-2.0
// Collectives in which each pair of ranks has a message of its own: all_to_all, gather, scatter and
// all_gather of parts with different sizes. A backend implements them as one operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace ddp::detail {

/// Elements of a tensor, in memory order.
struct ExchangePart {
  int64_t offset = 0;
  int64_t size = 0;
};

/// Parts of size 0 are sent only by MPI, and if `uneven`. The part of this rank itself is copied,
/// unless it is in place.
struct Exchange {
  const char* name;
  at::Tensor output = {};                   ///< undefined: this rank receives nothing
  at::Tensor input = {};                    ///< undefined: this rank sends nothing
  std::vector<ExchangePart> received = {};  ///< of `output`, by the rank that sends
  std::vector<ExchangePart> sent = {};      ///< of `input`, by the rank that receives
  /// A tensor whose size is equal on all ranks, for messages. Undefined: no size is.
  at::Tensor described = {};
  std::optional<int> root = {};
  bool uneven = false;  ///< the caller gave sizes

  const at::Tensor& any_tensor() const { return output.defined() ? output : input; }
  char* output_at(int rank) const;
  const char* input_at(int rank) const;
  /// False if this rank has no part, or has it in place.
  bool copies_own_part(int rank) const;
};

// Each throws SettingsError for wrong arguments.
Exchange all_gather_exchange(const Communicator& group, const at::Tensor& output,
                             const at::Tensor& input, at::IntArrayRef sizes);
Exchange all_to_all_exchange(const Communicator& group, const at::Tensor& output,
                             const at::Tensor& input, at::IntArrayRef output_sizes,
                             at::IntArrayRef input_sizes);
Exchange gather_exchange(const Communicator& group, const at::Tensor& output,
                         const at::Tensor& input, int root);
Exchange scatter_exchange(const Communicator& group, const at::Tensor& output,
                          const at::Tensor& input, int root);

/// "12 Float", "12 Float, root 1", "Float, uneven". Equal on all ranks whose calls fit.
std::string describe_parts(const Exchange& exchange);

/// A rank's numbers of elements, for the comparison of ranks whose parts are uneven.
struct ExchangeSizes {
  int rank = 0;                        ///< within the group
  std::vector<int64_t> sent = {};      ///< by the rank that receives
  std::vector<int64_t> expected = {};  ///< by the rank that sends
};
std::optional<ExchangeSizes> sizes_to_compare(const Exchange& exchange, int rank);

}  // namespace ddp::detail
