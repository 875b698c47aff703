// SPDX-License-Identifier: Apache-2.0
// Answers decoded on several ranks by a model that has memorised its conversations.
#include "language/decode_prompts.hpp"

#include <torch/torch.h>

#include <numeric>

#include "ddp/core/stop_signal.hpp"
#include "models/qwen2.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"
#include "unit/data/tokens/token_test_support.hpp"

namespace {

using Catch::Contains;
using ddp::test::context;

constexpr int32_t kEndOfTurn = 127;  // ids are characters; this one ends an answer

/// Turns of a chat. Answers begin with "A:", which is part of the prompt.
using Chat = std::vector<std::string>;

struct Marked {
  token_test::Documents documents;
  token_test::Documents targets;
};

Marked tokenize(const std::vector<Chat>& chats) {
  Marked result;
  for (const auto& chat : chats) {
    std::vector<int32_t> ids, marks;
    for (const auto& turn : chat) {
      const bool is_answer = turn.starts_with("A:");
      ids.insert(ids.end(), turn.begin(), turn.end());
      marks.insert(marks.end(), turn.size(), is_answer ? 1 : 0);
      if (is_answer) {
        std::fill_n(marks.end() - static_cast<int64_t>(turn.size()), 2, 0);
      }
      ids.push_back(kEndOfTurn);
      marks.push_back(is_answer ? 1 : 0);
    }
    result.documents.push_back(ids);
    result.targets.push_back(marks);
  }
  return result;
}

/// The conversations as an evaluation split, with their vocabulary.
class ChatFolder {
 public:
  explicit ChatFolder(const std::vector<Chat>& chats)
      : marked_(tokenize(chats)), folder_(parts(marked_)) {
    auto special = at::zeros({128}, at::kByte);
    special[kEndOfTurn] = 1;
    auto metadata = parts(marked_).metadata;
    metadata["format"] = "ddp_vocabulary";
    ddp::save_safetensors(folder_.file("vocabulary.safetensors"),
                          {{"bytes", at::arange(128, at::kLong).to(at::kByte)},
                           {"offsets", at::arange(129, at::kLong)},
                           {"special", special}},
                          metadata);
  }
  const Marked& marked() const { return marked_; }
  examples::DecodeResult decode(models::CausalLm& model, int64_t num_prompts) const {
    const auto dataset =
        folder_.open(token_test::token_options(models::TokenLayout::Pad, 256), ddp::Split::Test);
    return examples::decode_prompts(
        model, dataset, {.num_prompts = num_prompts, .max_new_tokens = 64, .batch_size = 2}, {},
        context(), /*stop_check_seconds=*/1);
  }

 private:
  static token_test::TokenParts parts(const Marked& marked) {
    auto result = token_test::make_parts(marked.documents, marked.targets);
    result.metadata["vocab_size"] = "128";
    result.metadata["end_of_turn"] = std::to_string(kEndOfTurn);
    result.metadata.erase("end_of_text");
    return result;
  }
  Marked marked_;
  token_test::TokenFolder folder_;
};

const std::vector<Chat> kChats = {
    {"U:rate?", R"(A:<functioncall> {"name": "rate", "arguments": '{"of": 1}'})",
     R"(F:{"rate": 7})", "A:It is 7."},
    {"U:date?", R"(A:<functioncall> {"name": "date"})", "F:May", "A:May."},
    {"U:hello", "A:Hi."}};

models::Qwen2Options tiny_qwen2() {
  return {.vocab_size = 128,
          .hidden_size = 64,
          .intermediate_size = 128,
          .num_layers = 2,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 16,
          .max_positions = 256,
          .rope_theta = 1e4,
          .initializer_range = 0.1};
}

/// A small model, trained until it has memorised the conversations; equal on all ranks.
models::Qwen2 overfitted(const Marked& marked) {
  torch::manual_seed(1);
  models::Qwen2 model(tiny_qwen2());
  model->reset_parameters();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  float loss = 1;
  for (int step = 0; step < 400 && loss > 0.02F; ++step) {
    optimizer.zero_grad();
    loss = 0;
    for (std::size_t i = 0; i < marked.documents.size(); ++i) {
      const auto ids = torch::tensor(marked.documents[i]).to(torch::kLong).unsqueeze(0);
      const auto marks = torch::tensor(marked.targets[i]).unsqueeze(0);
      const auto labels = ids.masked_fill(marks == 0, models::kIgnoredLabel);
      const auto mean =
          model->forward({.input_ids = ids.slice(1, 0, -1)}, labels.slice(1, 1)).loss_sum /
          marks.sum();
      mean.backward();
      loss = std::max(loss, mean.item<float>());
    }
    optimizer.step();
  }
  return model;
}

TEST_CASE("decoded answers are compared with those of every turn") {
  const ChatFolder known(kChats);
  auto model = overfitted(known.marked());
  {
    const auto result = known.decode(*model, 100);
    INFO(result.to_string() << '\n' << result.shown);
    CHECK(result.num_prompts == 5);
    CHECK(result.num_calls == 2);
    CHECK(result.num_equal_calls == 2);
    CHECK(result.num_equal_names == 2);
    CHECK(result.num_undue_calls == 0);
    CHECK(result.num_equal == 5);
    CHECK(result.num_too_long == 0);
    CHECK(
        result.to_string() ==
        "2 of 2 (100.00 %) API calls equal the reference, 2 of 2 (100.00 %) call the same API, "
        "0 of 3 (0.00 %) answers call one where the reference does not; 5 of 5 (100.00 %) answers "
        "equal the reference");
  }
  CHECK_THAT(known.decode(*model, 1).to_string(),
             Contains("1 of 1 (100.00 %) API calls equal the reference"));

  // Other references for the same prompts: other arguments, and no call.
  const ChatFolder other(
      {{"U:rate?", R"(A:<functioncall> {"name": "rate", "arguments": '{"of": 2}'})"},
       {"U:date?", "A:I cannot know."}});
  const auto wrong = other.decode(*model, 100);
  CHECK(wrong.to_string() ==
        "0 of 1 (0.00 %) API calls equal the reference, 1 of 1 (100.00 %) call the same API, 1 of "
        "1 (100.00 %) answers call one where the reference does not; 0 of 2 (0.00 %) answers equal "
        "the reference");

  CHECK(ChatFolder({kChats[2]}).decode(*model, 100).to_string() ==
        "none of 1 references calls an API, 0 of 1 (0.00 %) answers call one where the reference "
        "does not; 1 of 1 (100.00 %) answers equal the reference");
}

TEST_CASE("all ranks stop decoding if one is asked") {
  const ChatFolder known(kChats);
  models::Qwen2 model(tiny_qwen2());
  model->reset_parameters();
  CHECK(known.decode(*model, 100).stopped_by.empty());
  const int last = context().world_size() - 1;
  if (context().rank() == last) {
    ddp::request_stop();
  }
  CHECK(known.decode(*model, 100).stopped_by == ddp::concat("rank ", last, " was asked to stop"));
  ddp::clear_stop_request();
}

}  // namespace
