// SPDX-License-Identifier: Apache-2.0
// Costs of token data: opening, packing, a batch, and next() in a training loop whose step sleeps.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "ddp/core/safetensors.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/data/sample_rng.hpp"
#include "ddp/train/command_line.hpp"
#include "models/tokens/token_dataset.hpp"

namespace {

constexpr const char* kUsage = R"(usage:
  bench_tokens [cpu | cuda [FOLDER]]

FOLDER: where the texts of random ids are written (280 MB; default: the system's temporary
folder).
)";

using Clock = std::chrono::steady_clock;
using models::TokenDataOptions;
using models::TokenDataset;
using models::TokenLayout;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Writes documents of 40 to 439 tokens, each with its second half as target, or one document.
void write_text(const std::filesystem::path& folder, int64_t num_tokens, bool as_chat) {
  std::filesystem::create_directories(folder);
  std::vector<int64_t> offsets{0};
  at::Tensor targets = at::zeros({num_tokens}, at::kByte);
  for (ddp::SampleRng rng(1, 0, 0); offsets.back() < num_tokens;) {
    const int64_t begin = offsets.back();
    const int64_t length = as_chat ? 40 + rng.below(400) : num_tokens;
    offsets.push_back(std::min(begin + length, num_tokens));
    targets.slice(0, begin + length / 2, offsets.back()).fill_(1);
  }
  ddp::TensorMap tensors{{"tokens", at::randint(50257, {num_tokens}, at::kInt).to(at::kUInt16)},
                         {"documents", at::tensor(offsets, at::kLong)}};
  if (as_chat) {
    tensors["targets"] = targets;
  }
  ddp::save_safetensors((folder / "train.safetensors").string(), tensors,
                        {{"format", "ddp_tokens"},
                         {"format_version", "1"},
                         {"vocab_size", "50257"},
                         {"tokenizer", "none"}});
}

// `step_ms` is the duration of an empty step, 0 for none.
void bench_loader(const std::string& name, const std::shared_ptr<TokenDataset>& dataset,
                  int64_t batch_size, at::Device device, int num_workers, double step_ms) {
  ddp::DataLoader loader(dataset, ddp::DistributedSampler(dataset->size(), 0, 1), device,
                         {.batch_size = batch_size, .num_workers = num_workers, .drop_last = true},
                         models::TokenCollate(*dataset));
  (void)loader.next();
  const auto step = std::chrono::duration<double, std::milli>(step_ms);
  double in_next = 0;
  int64_t tokens = 0;
  int num_steps = 0;
  const double waited_before = loader.wait_ms();
  const auto begin = Clock::now();
  while (seconds_since(begin) < 3) {
    const auto call = Clock::now();
    tokens += loader.next().num_tokens;
    in_next += seconds_since(call);
    ++num_steps;
    std::this_thread::sleep_for(step);
  }
  const double next_us = 1e6 * in_next / num_steps;
  const double wait_us = 1e3 * (loader.wait_ms() - waited_before) / num_steps;
  std::printf("%s, %ld x %ld, %d workers: next() %.0f us, %.0f of them waiting", name.c_str(),
              batch_size, dataset->options().max_seq_len, num_workers, next_us, wait_us);
  if (step_ms > 0) {
    std::printf(", %.3f %% of a step of %.0f ms\n", wait_us / 10 / step_ms, step_ms);
  } else {
    std::printf(", %.1f M tokens/s\n", 1e-6 * static_cast<double>(tokens) / seconds_since(begin));
  }
}

void bench(const std::string& name, TokenDataOptions options, int64_t batch_size, at::Device device,
           double step_ms) {
  const auto begin = Clock::now();
  const auto dataset = std::make_shared<TokenDataset>(options, ddp::Split::Train);
  const auto& statistics = dataset->statistics();
  std::printf("%s: opened, checked and laid out in %.0f ms: %ld tokens, padding %.2f %%\n",
              name.c_str(), 1e3 * seconds_since(begin),
              statistics.num_tokens + statistics.num_tokens_left_out,
              100 * statistics.padding_share);
  bench_loader(name, dataset, batch_size, device, 0, 0);
  bench_loader(name, dataset, batch_size, device, 2, 0);
  bench_loader(name, dataset, batch_size, device, 2, step_ms);
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  const at::Device device(argc > 1 ? argv[1] : "cpu");
  const auto root = argc > 2 ? std::filesystem::path(argv[2]) / "bench_tokens"
                             : std::filesystem::temp_directory_path() / "bench_tokens";
  write_text(root / "chat", 20'000'000, true);
  write_text(root / "text", 100'000'000, false);
  TokenDataOptions options;
  options.path = (root / "chat").string();
  options.max_seq_len = 4096;
  bench("pack", options, 2, device, 600);
  options.layout = TokenLayout::Pad;
  bench("pad", options, 36, device, 600);
  options = {};
  options.path = (root / "text").string();
  options.layout = TokenLayout::Stream;
  bench("stream", options, 16, device, 40);
  std::filesystem::remove_all(root);
  return 0;
}
