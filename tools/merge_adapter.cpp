// SPDX-License-Identifier: Apache-2.0
// Merges a LoRA adapter into its base and saves a full model that transformers and libddp load.
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/train/command_line.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace {

constexpr const char* kUsage = R"(usage: merge_adapter BASE ADAPTER OUTPUT [options]

Merges a LoRA adapter into its base and saves a full model that transformers and libddp load.

  BASE     folder with config.json and model.safetensors (or shards and their index)
  ADAPTER  folder with adapter_config.json and adapter_model.safetensors
  OUTPUT   a new folder; it appears when it is complete

  --dtype float32|bfloat16|float16  dtype of the weights in OUTPUT (default: that of BASE)
  --max-shard-gb N                  largest file in OUTPUT, in 1e9 bytes (default: 5)
  --version                         versions of libddp and of the libraries it uses
)";

at::ScalarType parse_dtype(const std::string& name) {
  for (const auto& [word, dtype] :
       {std::pair{"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}}) {
    if (name == word) {
      return dtype;
    }
  }
  throw ddp::SettingsError("--dtype is \"" + name + "\": float32, bfloat16 or float16");
}

int64_t parse_gb(const std::string& text) {
  const auto gb = ddp::detail::parse_number<double>(text);
  if (!gb || !(*gb > 0 && *gb <= 1e6)) {
    throw ddp::SettingsError("--max-shard-gb is \"" + text + "\": a number above 0");
  }
  return static_cast<int64_t>(*gb * 1e9);
}

int merge(const std::vector<std::string>& arguments) {
  std::vector<std::string> folders;
  models::PretrainedSaveOptions options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const bool has_value = i + 1 < arguments.size();
    if (argument == "--dtype" && has_value) {
      options.dtype = parse_dtype(arguments[++i]);
    } else if (argument == "--max-shard-gb" && has_value) {
      options.max_shard_bytes = parse_gb(arguments[++i]);
    } else if (argument.starts_with("--")) {
      throw ddp::SettingsError("unknown or incomplete argument " + argument + "\n" + kUsage);
    } else {
      folders.push_back(argument);
    }
  }
  if (folders.size() != 3) {
    throw ddp::SettingsError(std::string("expected BASE, ADAPTER and OUTPUT\n") + kUsage);
  }
  const auto begin = std::chrono::steady_clock::now();
  models::merge_adapter(folders[0], folders[1], folders[2], options);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const auto merged = "merged " + folders[1] + " into " + folders[0] + ": " + folders[2];
  std::printf("%s, in %.1f s\n", ddp::detail::printable(merged).c_str(), elapsed.count());
  return 0;
}

void print(const std::exception& error) {
  std::fprintf(stderr, "merge_adapter: %s\n", ddp::detail::printable(error.what()).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  try {
    return merge({argv + 1, argv + argc});
  } catch (const ddp::Error& error) {
    print(error);
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    print(error);
    return static_cast<int>(ddp::ExitCode::UserException);
  }
}
