// SPDX-License-Identifier: Apache-2.0
// All-reduces by copies between ranks of one process, which share a GPU: each has its own memory
// and its own stream.
#include "comm/copy_all_reduce.hpp"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "ops/tensor_launch.hpp"
#include "support/catch.hpp"

using ddp::detail::CopyAllReduce;
using ddp::detail::PeerAddresses;

namespace {

constexpr int64_t kGuard = 64;  // elements before and behind the reduced ones

at::Tensor bytes_on_device(size_t num_bytes) {
  return at::zeros({static_cast<int64_t>(num_bytes)}, at::device(at::kCUDA).dtype(at::kByte));
}

PeerAddresses addresses_of(const std::vector<at::Tensor>& tensors, size_t offset = 0) {
  PeerAddresses addresses;
  for (const auto& tensor : tensors) {
    addresses.push_back(static_cast<char*>(tensor.mutable_data_ptr()) + offset);
  }
  return addresses;
}

class Ranks {
 public:
  explicit Ranks(int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      slots_.push_back(bytes_on_device(CopyAllReduce::kSlotsBytes));
      flags_.push_back(bytes_on_device(CopyAllReduce::flags_bytes(world_size)));
      streams_.push_back(c10::cuda::getStreamFromPool());
    }
    for (int rank = 0; rank < world_size; ++rank) {
      reductions_.emplace_back(rank, addresses_of(slots_), addresses_of(flags_));
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  c10::cuda::CUDAStream stream(size_t rank) const { return streams_[rank]; }
  void release(size_t rank) const { reductions_[rank].release(); }

  /// Reduces `tensors` without their guards.
  void run_rank(size_t rank, const std::vector<at::Tensor>& tensors, bool is_mean) const {
    const auto dtype = tensors[0].scalar_type();
    const auto guard = static_cast<size_t>(kGuard * tensors[0].element_size());
    reductions_[rank].run(addresses_of(tensors, guard), tensors[0].nbytes() - 2 * guard,
                          ddp::ops::detail::element_of(dtype), is_mean, streams_[rank]);
  }
  void run(const std::vector<at::Tensor>& tensors, bool is_mean) const {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (size_t rank = 0; rank < reductions_.size(); ++rank) {
      run_rank(rank, tensors, is_mean);
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }

 private:
  std::vector<at::Tensor> slots_, flags_;
  std::vector<c10::cuda::CUDAStream> streams_;
  std::vector<CopyAllReduce> reductions_;
};

// Small integers, so that sums are exact in any dtype; the guards are -1.
std::vector<at::Tensor> data(int world_size, int64_t n, at::ScalarType dtype) {
  std::vector<at::Tensor> tensors;
  for (int rank = 0; rank < world_size; ++rank) {
    auto tensor = at::full({n + 2 * kGuard}, -1, at::device(at::kCUDA).dtype(dtype));
    const auto values = at::remainder(at::arange(n, at::device(at::kCUDA)) + rank, 16);
    tensor.narrow(0, kGuard, n).copy_(values);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

at::Tensor reduced(const std::vector<at::Tensor>& tensors, bool is_mean) {
  auto sum = at::zeros_like(tensors[0], at::kFloat);
  for (const auto& tensor : tensors) {
    sum += tensor;
  }
  if (is_mean) {
    sum /= static_cast<double>(tensors.size());
  }
  sum.narrow(0, 0, kGuard).fill_(-1);
  sum.narrow(0, sum.numel() - kGuard, kGuard).fill_(-1);
  return sum.to(tensors[0].scalar_type());
}

}  // namespace

TEST_CASE("copies give each rank the sum or the mean, in parts of any size") {
  const int world_size = GENERATE(2, 3, 4, 8);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  CAPTURE(world_size, dtype);
  const Ranks ranks(world_size);
  // The last is more than the slots hold at once.
  for (const int64_t n :
       {int64_t{1}, int64_t{5}, int64_t{1000}, int64_t{1'000'003}, int64_t{40'000'001}}) {
    for (const bool is_mean : {false, true}) {
      CAPTURE(n, is_mean);
      const auto tensors = data(world_size, n, dtype);
      const auto expected = reduced(tensors, is_mean);
      ranks.run(tensors, is_mean);
      for (const auto& tensor : tensors) {
        REQUIRE(tensor.equal(expected));
      }
    }
  }
}

TEST_CASE("copies round a sum once, and a mean of fp16 is finite if the values are") {
  const Ranks ranks(4);
  auto wide = data(4, 1000, at::kBFloat16);
  for (size_t rank = 0; rank < wide.size(); ++rank) {
    wide[rank].fill_(rank == 0 ? 256.0 : 1.0);  // 256 + 1 is 256 in bfloat16
  }
  ranks.run(wide, /*is_mean=*/false);
  const auto expected = at::full({1}, 259.0, at::kFloat).to(at::kBFloat16).item();
  REQUIRE(wide[3].narrow(0, kGuard, 1000).eq(expected).all().item<bool>());

  auto large = data(4, 1000, at::kHalf);
  for (auto& tensor : large) {
    tensor.fill_(40000);
  }
  ranks.run(large, /*is_mean=*/true);
  REQUIRE(large[2].eq(40000).all().item<bool>());
}

TEST_CASE("eager copies of one rank meet replayed ones of another") {
  constexpr int kRanks = 3;
  const Ranks ranks(kRanks);
  auto tensors = data(kRanks, 300'001, at::kFloat);
  std::vector<at::Tensor> given;
  for (const auto& tensor : tensors) {
    given.push_back(tensor.clone());
  }
  const auto expected = reduced(tensors, /*is_mean=*/true);
  std::vector<at::cuda::CUDAGraph> graphs(kRanks);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    const c10::cuda::CUDAStreamGuard guard(ranks.stream(rank));
    graphs[rank].capture_begin();
    ranks.run_rank(rank, tensors, /*is_mean=*/true);
    graphs[rank].capture_end();
  }
  for (size_t round = 0; round < 12; ++round) {
    for (size_t rank = 0; rank < kRanks; ++rank) {
      tensors[rank].copy_(given[rank]);
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (size_t rank = 0; rank < kRanks; ++rank) {
      const c10::cuda::CUDAStreamGuard guard(ranks.stream(rank));
      if ((round + rank) % 3 == 0) {
        ranks.run_rank(rank, tensors, /*is_mean=*/true);
      } else {
        graphs[rank].replay();
      }
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (const auto& tensor : tensors) {
      REQUIRE(tensor.equal(expected));
    }
  }
}

TEST_CASE("after an abort no copies wait for a rank that never comes") {
  const bool is_replay = GENERATE(false, true);
  CAPTURE(is_replay);
  const auto* ranks = new Ranks(2);  // never freed: see release()
  const auto tensors = data(2, 300'000, at::kFloat);
  const auto twice = [&] {
    ranks->run_rank(0, tensors, /*is_mean=*/false);
    ranks->run_rank(0, tensors, /*is_mean=*/false);
  };
  const c10::cuda::CUDAStreamGuard guard(ranks->stream(0));
  at::cuda::CUDAGraph graph;
  if (is_replay) {
    graph.capture_begin();
    twice();
    graph.capture_end();
    graph.replay();
  } else {
    twice();
  }
  const auto stream = ranks->stream(0).stream();
  REQUIRE(cudaStreamQuery(stream) == cudaErrorNotReady);
  ranks->release(0);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  twice();  // what comes later waits no more either
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
}
