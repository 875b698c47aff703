// SPDX-License-Identifier: Apache-2.0
// Seconds and GB/s of loading a checkpoint into the module of each rank. Also prints the limits:
// copies from page-locked memory to the device, and reads from the page cache.
#include <torch/cuda.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/core/error.hpp"
#include "ddp/train/command_line.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "pretrained/positioned_file.hpp"
#include "pretrained/stored_weights.hpp"

namespace {

constexpr const char* kUsage = R"(usage:
  bench_weights --make GB FOLDER     writes a Qwen2-7B of about GB gigabytes
  bench_weights FOLDER [REPEATS]     alone, or on several ranks (mpirun, torchrun, srun)

15.2 GB are all 28 layers. The first load fills the page cache and is printed separately. GB =
1e9 bytes of weights. A rate of several ranks is that of the slowest one.
)";

constexpr int64_t kBlock = 4 << 20;

class Bench {
 public:
  Bench(const ddp::Context& context, std::string folder)
      : context_(context),
        folder_(std::move(folder)),
        stored_(models::detail::open_stored_weights(folder_)) {
    for (const auto& tensor : stored_.tensors) {
      num_bytes_ += static_cast<double>(tensor.num_bytes);
    }
  }

  void run(int repeats) {
    auto mapped = make_model();
    print("mapped files, first time", load(*mapped, models::WeightRoute::Mapped), 0);
    print("mapped files, page cache warm", load(*mapped, models::WeightRoute::Mapped), 0);
    const double reads = read_rate();
    const double copies = copy_rate();
    auto shared = make_model();
    for (int i = 0; i < repeats; ++i) {
      print(i == 0 ? "shared, first time (page-locked memory is made)" : "shared",
            load(*shared, models::WeightRoute::Shared), std::min(reads, copies));
    }
    compare(*mapped, *shared);
  }

 private:
  std::shared_ptr<models::CausalLm> make_model() {
    const auto config = models::read_hf_config(folder_);
    return models::make_causal_lm(
        config,
        at::TensorOptions().dtype(config.dtype.value_or(at::kFloat)).device(context_.device()));
  }

  void synchronize() const {
    if (context_.device().is_cuda()) {
      torch::cuda::synchronize();
    }
  }

  // Returns the seconds of the slowest rank.
  double seconds_of(const std::function<void()>& work) {
    synchronize();
    context_.communicator()->barrier();
    const auto begin = std::chrono::steady_clock::now();
    work();
    synchronize();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    auto slowest = at::tensor({elapsed.count()}, at::kDouble).to(context_.device());
    context_.communicator()->all_reduce(slowest, ddp::ReduceOp::Max)->wait();
    return slowest.item<double>();
  }

  double load(models::CausalLm& model, models::WeightRoute route) {
    return seconds_of([&] {
      models::load_pretrained(model, folder_, context_.communicator().get(), {.route = route});
    });
  }

  // Returns the GB/s of all ranks reading one part each, with as many threads as a load.
  double read_rate() {
    const int num_threads = static_cast<int>(
        std::clamp<int64_t>(std::thread::hardware_concurrency() / context_.world_size(), 1, 8));
    const double seconds = seconds_of([&] {
      std::vector<std::thread> threads;
      for (int i = 0; i < num_threads; ++i) {
        threads.emplace_back([&, i] {
          read_part(context_.rank() * num_threads + i, context_.world_size() * num_threads);
        });
      }
      for (auto& thread : threads) {
        thread.join();
      }
    });
    print(ddp::concat("limit: reads out of the page cache, ", num_threads, " threads a rank"),
          seconds, 0);
    return num_bytes_ / seconds / 1e9;
  }

  void read_part(int part, int num_parts) const {
    const auto buffer = at::empty({kBlock}, at::kByte);
    int64_t block = 0;
    for (const auto& path : stored_.files) {
      const models::detail::PositionedFile file(path);
      for (uint64_t at = 0; at < file.size(); at += kBlock, ++block) {
        if (block % num_parts == part) {
          file.read(at, buffer.data_ptr(), std::min<uint64_t>(kBlock, file.size() - at));
        }
      }
    }
  }

  // Returns the GB/s of all ranks copying one part each concurrently.
  double copy_rate() {
    if (!context_.device().is_cuda()) {
      return 1e9;
    }
    constexpr int64_t kBytes = 256 << 20;
    const auto source =
        at::ones({kBytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    auto target =
        at::empty({kBytes}, at::TensorOptions().dtype(at::kByte).device(context_.device()));
    target.copy_(source, /*non_blocking=*/true);
    const int count = std::max(
        8, static_cast<int>(num_bytes_ / context_.world_size() / static_cast<double>(kBytes)));
    const double seconds = seconds_of([&] {
      for (int i = 0; i < count; ++i) {
        target.copy_(source, /*non_blocking=*/true);
      }
    });
    const double rate = static_cast<double>(kBytes) * count * context_.world_size() / seconds / 1e9;
    print("limit: page-locked memory to the devices", num_bytes_ / rate / 1e9, 0);
    return rate;
  }

  void print(const std::string& what, double seconds, double limit) const {
    if (!context_.is_main()) {
      return;
    }
    const double rate = num_bytes_ / seconds / 1e9;
    std::printf("%-62s %8.3f s %8.2f GB/s", what.c_str(), seconds, rate);
    if (limit > 0) {
      std::printf("   %.2f of the lower limit", rate / limit);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  void compare(const models::CausalLm& a, const models::CausalLm& b) const {
    const auto expected = ddp::named_weights(a);
    for (const auto& [name, tensor] : ddp::named_weights(b)) {
      if (!torch::equal(tensor, expected.at(name))) {
        throw ddp::DataError("the two routes loaded different values into " + name);
      }
    }
    if (context_.is_main()) {
      std::printf("both routes loaded the same %.2f GB on %d ranks\n", num_bytes_ / 1e9,
                  context_.world_size());
    }
  }

  const ddp::Context& context_;
  std::string folder_;
  models::detail::StoredWeights stored_;
  double num_bytes_ = 0;
};

// Repeats a block of random values; its prime size makes each position recognisable.
void make(double gigabytes, const std::string& folder) {
  auto options = models::qwen2_7b();
  const double ends = 2.0 * 2 * static_cast<double>(options.vocab_size * options.hidden_size);
  constexpr double kLayerBytes = 466'115'584;
  options.num_layers = std::max(1, static_cast<int>((gigabytes * 1e9 - ends) / kLayerBytes + 0.5));
  if (gigabytes * 1e9 < ends) {  // small files, for trials
    options.vocab_size = 20'000;
  }
  const auto config = models::make_hf_config(options, at::kBFloat16);
  const auto model = models::make_causal_lm(config, at::kBFloat16);
  constexpr int64_t kValues = 1'048'573;
  const auto block = torch::randn({kValues}).to(at::kBFloat16);
  int64_t place = 0;
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    auto flat = parameter.view({-1});
    for (int64_t i = 0; i < flat.numel();) {
      const int64_t count = std::min(flat.numel() - i, kValues - place);
      flat.narrow(0, i, count).copy_(block.narrow(0, place, count));
      i += count;
      place = (place + count) % kValues;
    }
  }
  models::save_pretrained(*model, config, folder);
}

int run(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 3 && arguments[0] == "--make") {
    make(std::stod(arguments[1]), arguments[2]);
    return 0;
  }
  if (arguments.empty() || arguments.size() > 2 || arguments[0].starts_with("--")) {
    std::fputs(kUsage, stderr);
    return static_cast<int>(ddp::ExitCode::Settings);
  }
  const auto context = ddp::Context::create();
  Bench(context, arguments[0]).run(arguments.size() > 1 ? std::stoi(arguments[1]) : 4);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  try {
    return run(argc, argv);
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "bench_weights: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_weights: %s\n", error.what());
    return 1;
  }
}
