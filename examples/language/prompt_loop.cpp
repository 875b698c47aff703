// SPDX-License-Identifier: Apache-2.0
#include "language/prompt_loop.hpp"

#include <poll.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/core/stop_signal.hpp"

namespace examples {
namespace {

using Json = nlohmann::json;

/// Lines of standard input. A blocking read would not see a stop request.
class InputLines {
 public:
  /// The next line without its end; nullopt at the end of the input or after a stop request.
  std::optional<std::string> next() {
    while (!ddp::stop_requested()) {
      if (const auto end = buffer_.find('\n'); end != std::string::npos) {
        auto line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return line;
      }
      if (!fill()) {  // a last line without an end is a line too
        return buffer_.empty() ? std::nullopt : std::optional(std::exchange(buffer_, ""));
      }
    }
    return std::nullopt;
  }

 private:
  /// Waits for a moment and reads what is there. Returns false at the end of the input.
  bool fill() {
    constexpr int kPollMs = 100;
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (::poll(&input, 1, kPollMs) <= 0) {
      return true;
    }
    std::array<char, 4096> bytes;
    const auto count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    buffer_.append(bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    return count > 0 || (count < 0 && errno == EINTR);
  }

  std::string buffer_;
};

void write_line(const Json& line) {
  std::cout << line.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) << '\n'
            << std::flush;
}

std::vector<int64_t> parse_prompt(const std::string& line, int64_t num_tokens) {
  const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_array()) {
    throw std::invalid_argument(
        "a prompt is one line with a list of token ids, such as [1, 17, 5]; tools/chat.py takes "
        "text");
  }
  std::vector<int64_t> ids;
  for (const auto& id : json) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= num_tokens) {
      throw std::invalid_argument(ddp::concat("token id ", id.dump(), " is not one of 0 to ",
                                              num_tokens - 1, ", the ids of tokens.path"));
    }
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

}  // namespace

void require_prompt_settings(const ddp::Context& ctx, const ddp::Config& cfg,
                             const LanguageModelSettings& model, const std::string& adapter) {
  if (ctx.world_size() > 1) {
    throw ddp::SettingsError(ddp::concat(
        "prompts are answered by one rank, but this job has ", ctx.world_size(),
        " (context.world_size); fix: start one process, without mpirun, torchrun or srun"));
  }
  if (model.init == "random" && adapter.empty() && cfg.checkpoint.dir.empty()) {
    throw ddp::SettingsError(
        "model.init=random without a checkpoint or adapter: this model has learned nothing; fix: "
        "checkpoint.dir=FOLDER of a training run, lora.adapter=FOLDER (lora_ddp), or "
        "model.init=pretrained with model.path");
  }
}

void answer_prompts(models::CausalLm& model, const models::TokenDataset& data,
                    const LanguageModelSettings& settings, const AnswerOptions& options,
                    const ddp::AmpOptions& amp) {
  const torch::NoGradGuard no_grad;
  const ddp::Autocast autocast(amp);
  const auto end_tokens = data.tokenizer().end_tokens();
  models::SamplingOptions sampling{.temperature = options.temperature,
                                   .top_k = options.top_k,
                                   .seed = static_cast<uint64_t>(options.seed),
                                   .on_token = [](int64_t token) {
                                     write_line({{"token", token}});
                                   }};
  if (::isatty(STDIN_FILENO) != 0) {
    ddp::log_info("prompts are lines of token ids here; tools/chat.py talks in text");
  }
  InputLines lines;
  write_line({{"ready", {{"tokens", data.options().path}, {"model", settings.path}}}});
  while (const auto line = lines.next()) {
    try {
      const auto prompt = parse_prompt(*line, data.tokenizer().vocab_size);
      const auto answer = models::generate_sampled(model, prompt, options.max_new_tokens,
                                                   end_tokens, sampling, ddp::stop_requested);
      const bool ended = !answer.empty() && std::find(end_tokens.begin(), end_tokens.end(),
                                                      answer.back()) != end_tokens.end();
      write_line({{"end", ended ? "end_token" : "length"}});
      ++sampling.seed;
    } catch (const std::invalid_argument& error) {
      write_line({{"error", error.what()}});
    }
  }
}

}  // namespace examples
