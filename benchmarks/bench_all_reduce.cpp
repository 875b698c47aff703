// SPDX-License-Identifier: Apache-2.0
// Compares all_reduce through the communicator with a loop of NCCL alone, in the same launch mode
// and rounds. One process per GPU.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/tuning/group_choices.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/command_line.hpp"

namespace {

constexpr const char* kUsage = R"(usage:
  NCCL_NVLS_ENABLE=0 torchrun --no-python --nproc-per-node 4 bench_all_reduce [key=value …]

  min_bytes (4 KiB)  smallest buffer; sizes grow by 4
  max_bytes (1 GiB)  largest buffer
  iterations (0)     calls of a loop; 0: 5 to 100, fewer for larger buffers
  rounds (21)        each runs all loops one after the other, in rotating order
  ctas (0)           minimum thread blocks of every communicator; 0 keeps NCCL's choice
  dtype (float32)    or bfloat16
  op (sum)           or avg, for the communicator only
  modes (both)       eager, graph or both

Figures are medians over the rounds, from the slowest rank. algbw = bytes / time, busbw = algbw *
2 (n-1) / n, in GB/s (10^9). ratio = nccl's time / ours, extra = ours - nccl's time.
)";

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
  }
}
void check(ncclResult_t code, const char* what) {
  if (code != ncclSuccess) {
    throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(code));
  }
}

struct Settings {
  int64_t min_bytes = 4096;
  int64_t max_bytes = int64_t{1} << 30;
  int iterations = 0;
  int rounds = 21;
  int ctas = 0;
  at::ScalarType dtype = at::kFloat;
  ddp::ReduceOp op = ddp::ReduceOp::Sum;
  std::vector<bool> captured{false, true};
};

// The baseline: NCCL alone, on a high-priority stream like the communicator's.
class PlainNccl {
 public:
  PlainNccl(ddp::Context& context, const Settings& settings)
      : stream_(c10::cuda::getStreamFromPool(true, context.device().index())),
        dtype_(settings.dtype == at::kFloat ? ncclFloat32 : ncclBfloat16) {
    ncclUniqueId id{};
    if (context.rank() == 0) {
      check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    }
    const auto bytes =
        context.control_plane().broadcast(std::string(id.internal, sizeof(id.internal)));
    std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (settings.ctas > 0) {
      config.minCTAs = settings.ctas;
      config.maxCTAs = std::max(settings.ctas, 32);
    }
    check(ncclCommInitRankConfig(&comm_, context.world_size(), id, context.rank(), &config),
          "ncclCommInitRankConfig");
  }
  PlainNccl(const PlainNccl&) = delete;
  PlainNccl& operator=(const PlainNccl&) = delete;
  ~PlainNccl() { ncclCommDestroy(comm_); }

  c10::cuda::CUDAStream stream() const { return stream_; }
  void all_reduce(const at::Tensor& tensor) {
    check(ncclAllReduce(tensor.data_ptr(), tensor.data_ptr(), static_cast<size_t>(tensor.numel()),
                        dtype_, ncclSum, comm_, stream_.stream()),
          "ncclAllReduce");
  }

 private:
  c10::cuda::CUDAStream stream_;
  ncclDataType_t dtype_;
  ncclComm_t comm_ = nullptr;
};

using Loop = std::function<void()>;

// Returns the microseconds of one all_reduce on this rank.
double time_loop(const Loop& loop, int iterations) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto stream = c10::cuda::getCurrentCUDAStream();
  check(cudaEventRecord(begin, stream.stream()), "cudaEventRecord");
  loop();
  check(cudaEventRecord(end, stream.stream()), "cudaEventRecord");
  check(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return static_cast<double>(ms) * 1e3 / iterations;
}

double slowest_rank(ddp::Context& context, double value) {
  double worst = 0;
  for (const auto& text : context.control_plane().all_gather(std::to_string(value))) {
    worst = std::max(worst, std::stod(text));
  }
  return worst;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The stream of `nccl` waits for the caller's stream and vice versa, once per loop: every user
// needs this.
Loop plain_loop(PlainNccl& nccl, const at::Tensor& tensor, int iterations) {
  return [&nccl, tensor, iterations] {
    const auto current = c10::cuda::getCurrentCUDAStream();
    cudaEvent_t edge = nullptr;
    check(cudaEventCreateWithFlags(&edge, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    check(cudaEventRecord(edge, current.stream()), "cudaEventRecord");
    check(cudaStreamWaitEvent(nccl.stream().stream(), edge, 0), "cudaStreamWaitEvent");
    for (int i = 0; i < iterations; ++i) {
      nccl.all_reduce(tensor);
    }
    check(cudaEventRecord(edge, nccl.stream().stream()), "cudaEventRecord");
    check(cudaStreamWaitEvent(current.stream(), edge, 0), "cudaStreamWaitEvent");
    check(cudaEventDestroy(edge), "cudaEventDestroy");
  };
}

// Launches one after the other and waits at the end, like the reducer.
Loop communicator_loop(ddp::Communicator& comm, const at::Tensor& tensor, ddp::ReduceOp op,
                       int iterations) {
  return [&comm, tensor, op, iterations] {
    std::vector<ddp::WorkPtr> works;
    works.reserve(static_cast<size_t>(iterations));
    for (int i = 0; i < iterations; ++i) {
      works.push_back(comm.all_reduce(tensor, op));
    }
    for (const auto& work : works) {
      work->wait();
    }
  };
}

struct Captured {
  at::cuda::CUDAGraph graph;
  explicit Captured(const Loop& loop) {
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    loop();
    graph.capture_end();
  }
};

// Times the loops in turns: medians over the rounds, from the slowest rank.
std::vector<double> time_loops(ddp::Context& context, std::vector<Loop> loops, bool captured,
                               int iterations, int rounds) {
  std::vector<std::unique_ptr<Captured>> graphs;
  for (auto& loop : loops) {
    loop();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (captured) {
      graphs.push_back(std::make_unique<Captured>(loop));
      loop = [graph = graphs.back().get()] { graph->graph.replay(); };
    }
  }
  std::vector<std::vector<double>> times(loops.size());
  for (int round = -2; round < rounds; ++round) {  // two warm-up rounds
    for (size_t turn = 0; turn < loops.size(); ++turn) {
      const auto which = (turn + static_cast<size_t>(round + 2)) % loops.size();
      context.communicator()->barrier();
      const double us = slowest_rank(context, time_loop(loops[which], iterations));
      if (round >= 0) {
        times[which].push_back(us);
      }
    }
  }
  std::vector<double> medians;
  for (const auto& of_loop : times) {
    medians.push_back(median(of_loop));
  }
  return medians;
}

void print_row(const ddp::Context& context, bool captured, int64_t num_bytes,
               const std::vector<double>& us) {
  const double factor = 2.0 * (context.world_size() - 1) / context.world_size();
  const auto busbw = [&](double time) {
    return static_cast<double>(num_bytes) / time / 1e3 * factor;
  };
  std::printf("%-6s %12lld %10.2f %10.2f %9.2f %9.2f %8.4f %8.2f\n", captured ? "graph" : "eager",
              static_cast<long long>(num_bytes), us[0], us[1], busbw(us[0]), busbw(us[1]),
              us[0] / us[1], us[1] - us[0]);
  std::fflush(stdout);
}

void measure(ddp::Context& context, PlainNccl& nccl, const Settings& settings, int64_t num_bytes,
             bool captured) {
  auto& comm = *context.communicator();
  const int by_size = num_bytes <= (1 << 20) ? 100 : num_bytes <= (64 << 20) ? 20 : 5;
  const int iterations = settings.iterations > 0 ? settings.iterations : by_size;
  const auto make = [&] {
    return at::zeros({num_bytes / static_cast<int64_t>(c10::elementSize(settings.dtype))},
                     at::device(context.device()).dtype(settings.dtype));
  };
  const auto us = time_loops(context,
                             {plain_loop(nccl, make(), iterations),
                              communicator_loop(comm, make(), settings.op, iterations)},
                             captured, iterations, settings.rounds);
  if (context.is_main()) {
    print_row(context, captured, num_bytes, us);
  }
}

void run(const Settings& settings) {
  ddp::ContextOptions options;
  options.device = ddp::DeviceChoice::Cuda;
  options.communicator.nccl_min_ctas = settings.ctas;
  auto context = ddp::Context::create(options);
  if (std::string(context.communicator()->backend()) != "nccl") {
    throw ddp::SettingsError("bench_all_reduce needs at least two ranks with a GPU each");
  }
  {
    PlainNccl nccl(context, settings);
    if (context.is_main()) {
      const char* nvls = std::getenv("NCCL_NVLS_ENABLE");
      std::printf(
          "# %d ranks, %s, ours: %s, in place, min CTAs %d, NCCL_NVLS_ENABLE=%s, median of %d "
          "rounds\n",
          context.world_size(), c10::toString(settings.dtype), to_string(settings.op),
          settings.ctas, nvls == nullptr ? "unset" : nvls, settings.rounds);
      std::printf("%-6s %12s %10s %10s %9s %9s %8s %8s\n", "mode", "bytes", "nccl_us", "ddp_us",
                  "nccl_bus", "ddp_bus", "ratio", "extra_us");
    }
    for (const bool captured : settings.captured) {
      for (int64_t bytes = settings.min_bytes; bytes <= settings.max_bytes; bytes *= 4) {
        measure(context, nccl, settings, bytes, captured);
      }
    }
    if (context.is_main()) {
      std::printf("# plan: %s\n", context.communicator()
                                      ->choices()
                                      .plan()
                                      .find("all_reduce")
                                      .value_or("nothing measured")
                                      .c_str());
    }
  }
  context.close();
}

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto equals = argument.find('=');
    const auto key = argument.substr(0, equals);
    const auto value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (key == "min_bytes") {
      settings.min_bytes = std::max<int64_t>(4096, std::stoll(value));
    } else if (key == "iterations") {
      settings.iterations = std::max(0, std::stoi(value));
    } else if (key == "max_bytes") {
      settings.max_bytes = std::stoll(value);
    } else if (key == "rounds") {
      settings.rounds = std::max(1, std::stoi(value));
    } else if (key == "ctas") {
      settings.ctas = std::stoi(value);
    } else if (argument == "dtype=float32" || argument == "dtype=bfloat16") {
      settings.dtype = value == "float32" ? at::kFloat : at::kBFloat16;
    } else if (argument == "op=sum" || argument == "op=avg") {
      settings.op = value == "sum" ? ddp::ReduceOp::Sum : ddp::ReduceOp::Avg;
    } else if (argument == "modes=eager" || argument == "modes=graph") {
      settings.captured = {value == "graph"};
    } else if (argument != "modes=both") {
      throw ddp::SettingsError("bench_all_reduce: " + argument +
                               ": no such setting; --help lists them");
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_all_reduce: %s\n", error.what());
    return 1;
  }
}
