// SPDX-License-Identifier: Apache-2.0
#include "language/decode_prompts.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "ddp/amp/amp.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/train/stop_poll.hpp"

namespace examples {
namespace {

using ddp::concat;

template <typename F>
void for_each_count(DecodeResult& result, F&& f) {
  for (auto* count :
       {&result.num_prompts, &result.num_too_long, &result.num_equal, &result.num_calls,
        &result.num_undue_calls, &result.num_equal_calls, &result.num_equal_names}) {
    f(*count);
  }
}

void compare(const std::string& answer, const std::string& reference, DecodeResult& result) {
  const auto expected = find_api_call(reference);
  const auto given = find_api_call(answer);
  if (!expected) {
    result.num_undue_calls += given ? 1 : 0;
    return;
  }
  ++result.num_calls;
  if (given) {
    result.num_equal_calls += given->canonical == expected->canonical ? 1 : 0;
    result.num_equal_names += !given->name.empty() && given->name == expected->name ? 1 : 0;
  }
}

void sum_over_ranks(DecodeResult& result, ddp::ControlPlane& control_plane) {
  std::vector<int64_t> own;
  for_each_count(result, [&](int64_t count) { own.push_back(count); });
  const auto by_rank = control_plane.all_gather_numbers(own);
  std::size_t i = 0;
  for_each_count(result, [&](int64_t& count) {
    count = 0;
    for (const auto& counts : by_rank) {
      count += counts.at(i);
    }
    ++i;
  });
}

std::string indented(const std::string& text) {
  std::string result;
  for (const char c : models::valid_utf8(text)) {
    result += c == '\n' ? "\n            " : std::string(1, c);
  }
  return result;
}

/// Returns this rank's share of the prompts; counts and skips prompts longer than `max_length`.
std::vector<models::PromptReference> prompts_of_rank(
    const std::vector<models::PromptReference>& prompts, int64_t max_length,
    const ddp::Context& ctx, DecodeResult& result) {
  std::vector<models::PromptReference> own;
  for (std::size_t i = ctx.rank(); i < prompts.size(); i += ctx.world_size()) {
    if (static_cast<int64_t>(prompts[i].prompt.size()) > max_length) {
      ++result.num_too_long;
    } else {
      own.push_back(prompts[i]);
    }
  }
  return own;
}

/// Counts one answer, and prints the first `show` answers to result.shown.
void judge(const models::PromptReference& asked, const std::vector<int64_t>& answer,
           const models::Vocabulary& vocabulary, int64_t show, DecodeResult& result) {
  const auto answer_text = vocabulary.decode(answer);
  const auto reference_text = vocabulary.decode(asked.reference);
  result.num_equal += answer == asked.reference ? 1 : 0;
  compare(answer_text, reference_text, result);
  if (result.num_prompts++ < show) {
    result.shown += concat("document ", asked.document, ", answer ", asked.answer, "\n  prompt    ",
                           indented(vocabulary.decode(asked.prompt)), "\n  answer    ",
                           indented(answer_text), "\n  reference ", indented(reference_text), '\n');
  }
}

std::string share(int64_t count, int64_t all) {
  const ddp::detail::ClassicNumbers numbers;
  char text[80];
  std::snprintf(text, sizeof text, "%lld of %lld (%.2f %%)", static_cast<long long>(count),
                static_cast<long long>(all),
                all > 0 ? 100.0 * static_cast<double>(count) / static_cast<double>(all) : 0.0);
  return text;
}

}  // namespace

void describe_fields(DecodeSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "num_prompts",
           .doc = "Number of assistant turns of the evaluation split to decode and "
                  "compare with the reference, from the first. 0: none.",
           .min = 0},
          s.num_prompts);
  v.field({.name = "max_new_tokens",
           .doc = "Longest answer.",
           .unit = "tokens",
           .min = 1,
           .max = 1 << 20},
          s.max_new_tokens);
  v.field({.name = "batch_size",
           .doc = "Prompts per rank that are decoded at the same time.",
           .min = 1,
           .max = 4096},
          s.batch_size);
  v.field(
      {.name = "show", .doc = "Number of prompts to print with answer and reference.", .min = 0},
      s.show);
  v.field({.name = "temperature",
           .doc = "With run.mode=chat: divisor of the logits. 0: the likeliest tokens, as in "
                  "evaluations.",
           .min = 0,
           .max = 100},
          s.temperature);
  v.field({.name = "top_k",
           .doc = "With run.mode=chat and a temperature: draw from the k likeliest tokens. 0: from "
                  "all.",
           .min = 0},
          s.top_k);
  v.field({.name = "seed",
           .doc = "With run.mode=chat: seed for the draws of the first answer. Each answer adds 1.",
           .min = 0},
          s.seed);
}

std::string DecodeResult::to_string() const {
  auto text = num_calls > 0
                  ? concat(share(num_equal_calls, num_calls), " API calls equal the reference, ",
                           share(num_equal_names, num_calls), " call the same API")
                  : concat("none of ", num_prompts, " references calls an API");
  if (num_calls < num_prompts) {
    text = concat(text, ", ", share(num_undue_calls, num_prompts - num_calls),
                  " answers call one where the reference does not");
  }
  text = concat(text, "; ", share(num_equal, num_prompts), " answers equal the reference");
  return num_too_long > 0 ? concat(text, "; ", num_too_long, " too long for the model") : text;
}

void require_prompts(const models::TokenDataset& dataset, const DecodeSettings& settings) {
  if (dataset.prompt_references(1).empty()) {
    throw ddp::DataError(concat(dataset.path(), " has no answers to decode (decode.num_prompts=",
                                settings.num_prompts, "), because it holds no chats"));
  }
}

DecodeResult decode_prompts(models::CausalLm& model, const models::TokenDataset& dataset,
                            const DecodeSettings& settings, const ddp::AmpOptions& amp,
                            const ddp::Context& ctx, double stop_check_seconds) {
  require_prompts(dataset, settings);
  const auto end_tokens = dataset.tokenizer().end_tokens();
  torch::NoGradGuard no_grad;
  ddp::Autocast autocast(amp);
  DecodeResult result;
  const auto own = prompts_of_rank(dataset.prompt_references(settings.num_prompts),
                                   model.max_positions() - settings.max_new_tokens, ctx, result);
  const auto step = static_cast<std::size_t>(settings.batch_size);
  ddp::StopPoll poll(ctx, stop_check_seconds, "decoding");
  for (std::size_t first = 0; first < own.size() && !poll.should_stop(); first += step) {
    const std::size_t count = std::min(step, own.size() - first);
    std::vector<std::vector<int64_t>> prompts;
    for (std::size_t i = first; i < first + count; ++i) {
      prompts.push_back(own[i].prompt);
    }
    const auto answers = models::generate_greedy(model, prompts, settings.max_new_tokens,
                                                 end_tokens, [&] { return poll.should_stop(); });
    for (std::size_t i = 0; i < count; ++i) {
      judge(own[first + i], answers[i], dataset.vocabulary(), settings.show, result);
    }
  }
  poll.finish();
  result.stopped_by = poll.stop_reason();
  sum_over_ranks(result, ctx.control_plane());
  return result;
}
namespace {

using Json = nlohmann::json;  // sorts an object's keys

constexpr const char* kMark = "<functioncall>";

std::string single_spaced(const std::string& text) {
  std::istringstream words(text);
  std::string result;
  for (std::string word; words >> word;) {
    result += (result.empty() ? "" : " ") + word;
  }
  return result;
}

/// Removes the single quotes around an object: 'arguments': '{"a": 1}' is not JSON.
std::string without_single_quotes(const std::string& text) {
  const auto begin = text.find("'{");
  const auto end = text.rfind("}'");
  if (begin == std::string::npos || end == std::string::npos || end < begin) {
    return text;
  }
  return text.substr(0, begin) + text.substr(begin + 1, end - begin) + text.substr(end + 2);
}

std::optional<Json> parse_object(const std::string& text) {
  auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? std::optional(std::move(json)) : std::nullopt;
}

}  // namespace

std::optional<ApiCall> find_api_call(const std::string& answer) {
  const auto mark = answer.find(kMark);
  if (mark == std::string::npos) {
    return std::nullopt;
  }
  const auto text = single_spaced(answer.substr(mark + std::string(kMark).size()));
  auto call = parse_object(text);
  if (!call) {
    call = parse_object(without_single_quotes(text));
  }
  if (!call) {
    return ApiCall{.name = "", .canonical = text};
  }
  if (auto arguments = call->find("arguments");
      arguments != call->end() && arguments->is_string()) {
    if (const auto inner = parse_object(arguments->get<std::string>())) {
      *arguments = *inner;
    }
  }
  const auto name = call->find("name");
  return ApiCall{.name = name != call->end() && name->is_string() ? name->get<std::string>() : "",
                 .canonical = call->dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace examples
