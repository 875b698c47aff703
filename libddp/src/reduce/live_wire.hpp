// SPDX-License-Identifier: Apache-2.0
// Taps of 3x3 filters that no rank reads have a gradient of zero on all of them, which need not
// travel. What is live of a bucket is packed, reduced there, and unpacked:
//
//   bucket  | filter 0: 9 taps x channels | filter 1 | ... | bias | ...
//   wire    | filter 0: live taps | filter 1 | ... | bias | ...
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/ops/filter_taps.hpp"
#include "ddp/reduce/comm_hook.hpp"

namespace ddp::detail {

/// Whether memory keeps whole vectors of a tap together, [filters, taps, channels], so that dead
/// taps of this 3x3 filter can be left out.
bool has_rows_of_taps(const at::Tensor& gradient);

/// Bytes of a gradient on the wire.
int64_t live_bytes(int64_t num_bytes, ops::Taps live);

class LiveWire {
 public:
  /// Of `bucket`, of whose parameters `live` has the taps that any rank reads (kAllTaps for all
  /// but 3x3 filters); nothing where everything travels. Collective, where the communicator's
  /// memory is.
  static std::optional<LiveWire> make(const GradBucket& bucket, const std::vector<ops::Taps>& live);

  /// What travels; as `bucket.buffer`, the padding is zero.
  const at::Tensor& memory() const { return memory_; }
  /// In the order of the current stream. Dead taps of the bucket are neither read nor written.
  void pack() const;
  void unpack() const;
  /// The same by ATen, on any device: what pack() and unpack() are defined by.
  void pack_by_aten() const;
  void unpack_by_aten() const;

 private:
  // In elements. A piece whose taps are all live is one run of `inner` elements.
  struct Piece {
    int64_t bucket_begin = 0;
    int64_t wire_begin = 0;
    int64_t num_filters = 1;
    int64_t inner = 0;
    std::vector<int64_t> taps = {};
    int64_t numel() const {
      return num_filters * inner * (taps.empty() ? 1 : static_cast<int64_t>(taps.size()));
    }
  };

  void append(const at::Tensor& gradient, ops::Taps live);
  void make_tables();
  at::Tensor on_wire(const Piece& piece) const;
  at::Tensor in_bucket(const Piece& piece) const;
  void move(bool packs) const;

  at::Tensor buffer_;
  at::Tensor memory_;
  std::vector<Piece> pieces_;
  int64_t numel_ = 0;
  at::Tensor piece_table_, chunk_table_;  // CUDA
  int num_chunks_ = 0;
};

}  // namespace ddp::detail
