// SPDX-License-Identifier: Apache-2.0
#include "reduce/live_wire.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "core/device_table.hpp"
#include "ddp/core/error.hpp"
#include "reduce/tap_agreement.hpp"

#ifdef DDP_HAS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "reduce/wire_kernels.hpp"
#endif

namespace ddp::detail {
namespace {

constexpr int64_t kVectorBytes = 16;

}  // namespace

bool has_rows_of_taps(const at::Tensor& gradient) {
  if (!is_3x3_filter(gradient)) {
    return false;
  }
  const int64_t channels = gradient.size(1);
  return channels * gradient.element_size() % kVectorBytes == 0 && gradient.stride(1) == 1 &&
         gradient.stride(3) == channels && gradient.stride(2) == 3 * channels &&
         gradient.stride(0) == 9 * channels;
}

int64_t live_bytes(int64_t num_bytes, ops::Taps live) {
  return live == ops::kAllTaps || live == 0 ? num_bytes : num_bytes / 9 * std::popcount(live);
}

std::optional<LiveWire> LiveWire::make(const GradBucket& bucket,
                                       const std::vector<ops::Taps>& live) {
  LiveWire wire;
  wire.buffer_ = bucket.buffer;
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    wire.append(bucket.gradients[i], live[i]);
  }
  const bool leaves_out = std::any_of(wire.pieces_.begin(), wire.pieces_.end(),
                                      [](const Piece& piece) { return !piece.taps.empty(); });
  if (!leaves_out) {
    return std::nullopt;
  }
  wire.memory_ = bucket.communicator->allocate(wire.numel_ * bucket.buffer.element_size())
                     .view(bucket.buffer.scalar_type());
  wire.memory_.zero_();
  wire.make_tables();
  return wire;
}

void LiveWire::append(const at::Tensor& gradient, ops::Taps live) {
  const int64_t vector = kVectorBytes / gradient.element_size();
  Piece piece{.bucket_begin = gradient.storage_offset() - buffer_.storage_offset(),
              .wire_begin = numel_};
  if (live != ops::kAllTaps && live != 0 && has_rows_of_taps(gradient)) {
    piece.num_filters = gradient.size(0);
    piece.inner = gradient.size(1);
    for (int64_t tap = 0; tap < 9; ++tap) {
      if (((live >> tap) & 1) != 0) {
        piece.taps.push_back(tap);
      }
    }
  } else {  // with the padding behind it
    piece.inner = (gradient.numel() + vector - 1) / vector * vector;
  }
  numel_ += piece.numel();
  DDP_CHECK(piece.bucket_begin % vector == 0 && numel_ <= buffer_.numel(), "a gradient at ",
            piece.bucket_begin, " of ", buffer_.numel());
  pieces_.push_back(std::move(piece));
}

void LiveWire::make_tables() {
#ifdef DDP_HAS_CUDA
  if (!buffer_.is_cuda()) {
    return;
  }
  const int64_t vector = kVectorBytes / buffer_.element_size();
  std::vector<WirePiece> pieces;
  std::vector<WireChunk> chunks;
  for (const Piece& piece : pieces_) {
    WirePiece made{.bucket_begin = static_cast<int32_t>(piece.bucket_begin / vector),
                   .wire_begin = static_cast<int32_t>(piece.wire_begin / vector),
                   .count = static_cast<int32_t>(piece.numel() / vector),
                   .inner = static_cast<int32_t>(piece.inner / vector),
                   .num_live = piece.taps.empty() ? 9 : static_cast<int32_t>(piece.taps.size()),
                   .taps = 0};
    for (size_t place = 0; place < piece.taps.size(); ++place) {
      made.taps |= static_cast<uint64_t>(piece.taps[place]) << (4 * place);
    }
    for (int32_t first = 0; first < made.count; first += kWireThreads * kWireVectors) {
      chunks.push_back({static_cast<int32_t>(pieces.size()), first});
    }
    pieces.push_back(made);
  }
  piece_table_ = to_device(pieces, buffer_.device());
  chunk_table_ = to_device(chunks, buffer_.device());
  num_chunks_ = static_cast<int>(chunks.size());
#endif
}

at::Tensor LiveWire::on_wire(const Piece& piece) const {
  return memory_.narrow(0, piece.wire_begin, piece.numel())
      .view({piece.num_filters, -1, piece.inner});
}

at::Tensor LiveWire::in_bucket(const Piece& piece) const {
  const int64_t taps = piece.taps.empty() ? 1 : 9;
  return buffer_.narrow(0, piece.bucket_begin, piece.num_filters * taps * piece.inner)
      .view({piece.num_filters, taps, piece.inner});
}

void LiveWire::pack_by_aten() const {
  for (const Piece& piece : pieces_) {
    const auto whole = in_bucket(piece);
    on_wire(piece).copy_(
        piece.taps.empty()
            ? whole
            : whole.index_select(1, at::tensor(piece.taps, at::kLong).to(whole.device())));
  }
}

void LiveWire::unpack_by_aten() const {
  for (const Piece& piece : pieces_) {
    const auto whole = in_bucket(piece);
    if (piece.taps.empty()) {
      whole.copy_(on_wire(piece));
    } else {
      whole.index_copy_(1, at::tensor(piece.taps, at::kLong).to(whole.device()), on_wire(piece));
    }
  }
}

void LiveWire::pack() const {
  buffer_.is_cuda() ? move(/*packs=*/true) : pack_by_aten();
}

void LiveWire::unpack() const {
  buffer_.is_cuda() ? move(/*packs=*/false) : unpack_by_aten();
}

void LiveWire::move([[maybe_unused]] bool packs) const {
#ifdef DDP_HAS_CUDA
  const c10::cuda::CUDAGuard guard(buffer_.device());
  C10_CUDA_CHECK(
      launch_move_live(static_cast<const WirePiece*>(piece_table_.const_data_ptr()),
                       static_cast<const WireChunk*>(chunk_table_.const_data_ptr()), num_chunks_,
                       buffer_.mutable_data_ptr(), memory_.mutable_data_ptr(), packs,
                       c10::cuda::getCurrentCUDAStream(buffer_.device().index()).stream()));
#endif
}

}  // namespace ddp::detail
