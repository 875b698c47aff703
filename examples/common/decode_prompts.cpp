// SPDX-License-Identifier: Apache-2.0
#include "common/decode_prompts.hpp"

#include <torch/torch.h>

#include <cstdio>
#include <sstream>

#include "common/api_call.hpp"
#include "ddp/amp/autocast.hpp"
#include "ddp/core/error.hpp"

namespace examples {
namespace {

using ddp::detail::concat;

template <typename F>
void for_each_count(DecodeResult& result, F&& f) {
  for (auto* count : {&result.num_prompts, &result.num_too_long, &result.num_equal,
                      &result.num_calls, &result.num_equal_calls, &result.num_equal_names}) {
    f(*count);
  }
}

void compare(const std::string& answer, const std::string& reference, DecodeResult& result) {
  const auto expected = find_api_call(reference);
  if (!expected) {
    return;
  }
  ++result.num_calls;
  if (const auto given = find_api_call(answer)) {
    result.num_equal_calls += given->canonical == expected->canonical ? 1 : 0;
    result.num_equal_names += !given->name.empty() && given->name == expected->name ? 1 : 0;
  }
}

void sum_over_ranks(DecodeResult& result, ddp::ControlPlane& control_plane) {
  std::ostringstream own;
  for_each_count(result, [&](int64_t count) { own << count << ' '; });
  const auto texts = control_plane.all_gather(own.str());
  for_each_count(result, [](int64_t& count) { count = 0; });
  for (const auto& text : texts) {
    std::istringstream in(text);
    for_each_count(result, [&](int64_t& count) {
      int64_t of_rank = 0;
      in >> of_rank;
      count += of_rank;
    });
  }
}

std::string indented(const std::string& text) {
  std::string result;
  for (const char c : ddp::valid_utf8(text)) {
    result += c == '\n' ? "\n            " : std::string(1, c);
  }
  return result;
}

std::string share(int64_t count, int64_t all) {
  char text[80];
  std::snprintf(text, sizeof text, "%lld of %lld (%.2f %%)", static_cast<long long>(count),
                static_cast<long long>(all),
                all > 0 ? 100.0 * static_cast<double>(count) / static_cast<double>(all) : 0.0);
  return text;
}

}  // namespace

void describe_fields(DecodeSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "num_prompts",
           .doc = "evaluation documents whose last answer is decoded and compared; 0: none",
           .min = 0},
          s.num_prompts);
  v.field({.name = "max_new_tokens",
           .doc = "longest answer",
           .unit = "tokens",
           .min = 1,
           .max = 1 << 20},
          s.max_new_tokens);
  v.field({.name = "show", .doc = "prompts printed with answer and reference", .min = 0}, s.show);
}

std::string DecodeResult::to_string() const {
  auto text = concat(share(num_equal, num_prompts), " answers equal the reference");
  if (num_calls > 0) {
    text = concat(share(num_equal_calls, num_calls), " API calls equal the reference, ",
                  share(num_equal_names, num_calls), " call the same API; ", text);
  }
  return num_too_long > 0 ? concat(text, "; ", num_too_long, " too long for the model") : text;
}

void require_prompts(const ddp::TokenDataset& dataset, const DecodeSettings& settings) {
  if (dataset.prompt_references(1).empty()) {
    throw ddp::DataError(concat(dataset.file().path(),
                                " has no answers to decode (decode.num_prompts=",
                                settings.num_prompts, "): it holds no chats"));
  }
}

DecodeResult decode_prompts(models::CausalLm& model, const ddp::TokenDataset& dataset,
                            const DecodeSettings& settings, const ddp::AmpOptions& amp,
                            const ddp::Context& ctx) {
  require_prompts(dataset, settings);
  const auto prompts = dataset.prompt_references(settings.num_prompts);
  const auto& vocabulary = dataset.vocabulary();
  const auto end_tokens = dataset.file().tokenizer().end_tokens();
  torch::NoGradGuard no_grad;
  ddp::Autocast autocast(amp);
  DecodeResult result;
  std::ostringstream shown;
  int64_t num_shown = 0;
  for (std::size_t i = ctx.rank(); i < prompts.size(); i += ctx.world_size()) {
    const auto& [document, prompt, reference] = prompts[i];
    if (static_cast<int64_t>(prompt.size()) + settings.max_new_tokens > model.max_positions()) {
      ++result.num_too_long;
      continue;
    }
    const auto answer = models::generate_greedy(model, prompt, settings.max_new_tokens, end_tokens);
    const auto answer_text = vocabulary.decode(answer);
    const auto reference_text = vocabulary.decode(reference);
    ++result.num_prompts;
    result.num_equal += answer == reference ? 1 : 0;
    compare(answer_text, reference_text, result);
    if (num_shown++ < settings.show) {
      shown << "document " << document << '\n'
            << "  prompt    " << indented(vocabulary.decode(prompt)) << '\n'
            << "  answer    " << indented(answer_text) << '\n'
            << "  reference " << indented(reference_text) << '\n';
    }
  }
  sum_over_ranks(result, ctx.control_plane());
  result.shown = shown.str();
  return result;
}

}  // namespace examples
