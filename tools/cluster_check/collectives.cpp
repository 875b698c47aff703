// SPDX-License-Identifier: Apache-2.0
// Collectives over all ranks, and messages between each pair of ranks. Latency, algbw and busbw are
// defined as in nccl-tests (doc/PERFORMANCE.md there).
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <vector>

#include "core/control/wire/tcp_socket.hpp"
#include "ddp/core/error.hpp"
#include "pairing.hpp"
#include "run.hpp"
#include "stopwatch.hpp"

namespace cluster_check {
namespace {

constexpr int64_t kKib = 1 << 10, kMib = 1 << 20;
constexpr int kWarmUpCalls = 3;
constexpr double kTargetMs = 60;  // of one measurement
constexpr int64_t kMaxCalls = 200;

std::string size_text(int64_t bytes) {
  return bytes >= kMib ? ddp::concat(bytes / kMib, " MiB") : ddp::concat(bytes / kKib, " KiB");
}

torch::Tensor new_buffer(const Run& run, int64_t bytes) {
  return torch::zeros({bytes / 4},
                      torch::TensorOptions().device(run.context.device()).dtype(torch::kFloat));
}

/// The largest of the ranks' values.
double max_over_ranks(const Run& run, double value) {
  auto tensor = torch::full({1}, value, torch::TensorOptions().dtype(torch::kDouble))
                    .to(run.context.device());
  run.context.communicator()->all_reduce(tensor, ddp::ReduceOp::Max)->wait_host();
  return tensor.item<double>();
}

/// Microseconds of one call on the slowest rank. `call` starts the operation and waits for it.
double measure_us(Run& run, const std::function<void()>& call) {
  Stopwatch watch(run.context.device());
  for (int i = 0; i < kWarmUpCalls; ++i) {  // the first one sets up connections
    watch.start();
    call();
    watch.stop();
  }
  const double trial = max_over_ranks(run, watch.milliseconds());
  const auto calls = std::clamp<int64_t>(static_cast<int64_t>(kTargetMs / trial), 3, kMaxCalls);
  run.context.communicator()->barrier();
  watch.start();
  for (int64_t i = 0; i < calls; ++i) {
    call();
  }
  watch.stop();
  return max_over_ranks(run, watch.milliseconds()) * 1000 / static_cast<double>(calls);
}

void check_sums(Run& run) {
  const auto communicator = run.context.communicator();
  auto tensor = new_buffer(run, 32 * kMib / (run.on_gpu() ? 1 : 8));
  tensor.fill_(static_cast<float>(run.context.rank() + 1));
  communicator->all_reduce(tensor)->wait_host();
  const auto n = static_cast<double>(run.context.world_size());
  const bool is_right = tensor.eq(n * (n + 1) / 2).all().item<bool>();
  // A wrong all-reduce cannot be trusted to count: the control plane does.
  double count = 0;
  for (const auto& numbers : run.context.control_plane().all_gather_numbers({is_right ? 0 : 1})) {
    count += static_cast<double>(numbers[0]);
  }
  run.add_for_all("collectives", "wrong_sums", count, "");
}

struct Operation {
  const char* name;
  double bus_factor;  ///< busbw / algbw
  std::function<void(int64_t bytes)> call;
};

std::vector<Operation> operations(Run& run, const torch::Tensor& buffer) {
  const auto communicator = run.context.communicator();
  const int64_t ranks = run.context.world_size(), rank = run.context.rank();
  const double n = static_cast<double>(ranks);
  // As in nccl-tests, the size of all-gather and reduce-scatter is that of the larger buffer.
  const auto part = [buffer, ranks, rank](int64_t bytes) {
    const int64_t share = std::max<int64_t>(bytes / 4 / ranks, 1);
    return std::pair{buffer.narrow(0, 0, share * ranks), buffer.narrow(0, rank * share, share)};
  };
  return {
      {"all_reduce", 2 * (n - 1) / n,
       [=](int64_t bytes) { communicator->all_reduce(buffer.narrow(0, 0, bytes / 4))->wait(); }},
      {"all_gather", (n - 1) / n,
       [=](int64_t bytes) {
         const auto [whole, own] = part(bytes);
         communicator->all_gather(whole, own)->wait();
       }},
      {"reduce_scatter", (n - 1) / n, [=](int64_t bytes) {
         const auto [whole, own] = part(bytes);
         communicator->reduce_scatter(own, whole)->wait();
       }}};
}

std::vector<int64_t> sizes_of(const Run& run) {
  const int64_t largest = run.on_gpu() ? 1024 * kMib : 16 * kMib;
  if (run.options.quick) {
    return {kKib, largest / 256, largest / 16, largest};
  }
  std::vector<int64_t> sizes;
  for (int64_t bytes = kKib; bytes <= largest; bytes *= 4) {
    sizes.push_back(bytes);
  }
  return sizes;
}

void check_operations(Run& run) {
  const auto sizes = sizes_of(run);
  const int64_t ranks = run.context.world_size();
  // Room for sizes that the ranks do not divide.
  const auto buffer = new_buffer(run, sizes.back() + 4 * ranks);
  for (const auto& operation : operations(run, buffer)) {
    const std::string name = operation.name;
    if (run.options.quick && name != "all_reduce") {
      continue;
    }
    run.begin(name);
    CollectivePoint last;
    for (const int64_t bytes : sizes) {
      const double us = measure_us(run, [&] { operation.call(bytes); });
      const double algbw = static_cast<double>(bytes) / us / 1000;
      last = {name, bytes, us, algbw, algbw * operation.bus_factor};
      if (run.context.is_main()) {
        run.report.points.push_back(last);
      }
      if (name == "all_reduce" && bytes == kKib) {
        run.add_for_all("collectives", "all_reduce_latency", us, "us", size_text(bytes));
      }
    }
    run.add_for_all("collectives", name + "_busbw", last.busbw, "GB/s", size_text(last.bytes));
  }
}

/// GB/s of a message from the lower to the higher rank of a pair, or back. Ranks without a partner
/// return 0.
double measure_pair(Run& run, const torch::Tensor& buffer, int partner, bool upwards) {
  const auto communicator = run.context.communicator();
  const int rank = run.context.rank();
  const bool idle = partner >= run.context.world_size();
  const bool sends = (rank < partner) == upwards;
  const auto message = [&] {
    if (!idle) {
      (sends ? communicator->send(buffer, partner) : communicator->recv(buffer, partner))->wait();
    }
  };
  message();
  communicator->barrier();
  constexpr int kMessages = 5;
  Stopwatch watch(run.context.device());
  watch.start();
  for (int i = 0; i < kMessages; ++i) {
    message();
  }
  watch.stop();
  const double ms = watch.milliseconds();
  communicator->barrier();
  return idle ? 0 : static_cast<double>(buffer.nbytes()) * kMessages / ms / 1e6;
}

/// As the receivers measured it.
PairMatrix measure_pairs(Run& run, int64_t bytes) {
  const int ranks = run.context.world_size(), rank = run.context.rank();
  const int slots = ranks + ranks % 2;
  const auto buffer = new_buffer(run, bytes);
  std::vector<int64_t> received(static_cast<std::size_t>(ranks), 0);  // kB/s from each rank
  for (int round = 0; round < slots - 1; ++round) {
    const int partner = partner_of(rank, round, slots);
    for (const bool upwards : {true, false}) {
      const double gbps = measure_pair(run, buffer, partner, upwards);
      if (partner < ranks && (rank > partner) == upwards) {
        received[static_cast<std::size_t>(partner)] = static_cast<int64_t>(gbps * 1e6);
      }
    }
  }
  return pairs_from(run.context.control_plane().all_gather_numbers(received));
}

/// Adds the slowest link's row and returns the link.
SlowestLink add_slowest(Run& run, const char* name, const std::vector<Link>& links,
                        const std::vector<std::string>& hosts) {
  if (links.empty()) {
    run.add_for_all("collectives", name, {}, "GB/s", "no such pair");
    return {};
  }
  const auto slowest = slowest_of(links, hosts);
  run.add_for_all("collectives", name, slowest.link.gbps, "GB/s", slowest.text);
  return slowest;
}

void check_pairs(Run& run) {
  auto& plane = run.context.control_plane();
  const auto nodes = plane.all_gather_numbers({run.context.node_rank()});
  const auto hosts = plane.all_gather(ddp::detail::host_name());
  run.begin("pairs");
  const int64_t bytes = run.on_gpu() ? 64 * kMib : kMib;
  const auto pairs = measure_pairs(run, bytes);
  if (run.context.is_main()) {
    run.report.pairs = pairs;
    run.report.pair_bytes = bytes;
  }
  std::vector<int64_t> node_of;
  for (const auto& numbers : nodes) {
    node_of.push_back(numbers[0]);
  }
  const auto links = links_of(pairs, node_of);
  const auto inside = add_slowest(run, "pair_same_node", links.same_node, hosts);
  const auto between = add_slowest(run, "pair_other_node", links.other_node, hosts);
  const auto& worst = inside.percent > between.percent ? inside : between;
  run.add_for_all("collectives", "pair_percent_below_median", worst.percent, "%", worst.text);
}

}  // namespace

void check_collectives(Run& run) {
  const torch::NoGradGuard no_grad;
  run.begin("collectives");
  if (run.context.world_size() == 1) {  // nothing would move
    run.add_for_all("collectives", "all_reduce_busbw", {}, "GB/s", "one rank");
    return;
  }
  check_sums(run);
  check_operations(run);
  if (!run.options.quick) {
    check_pairs(run);
  }
}

}  // namespace cluster_check
