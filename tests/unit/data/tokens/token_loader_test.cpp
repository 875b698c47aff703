// SPDX-License-Identifier: Apache-2.0
// Token data through sampler and loader: each target of the text is seen once per epoch at any
// number of ranks. A run resumes where it stopped.
#include <ATen/ATen.h>

#include <map>

#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/tokens/token_test_support.hpp"

using namespace token_test;
using models::LongDocuments;
using models::TokenBatch;
using models::TokenCollate;
using models::TokenDataOptions;
using models::TokenDataset;
using models::TokenLayout;

namespace {

using TokenLoader = ddp::DataLoader<TokenDataset, TokenCollate>;

struct Run {
  std::shared_ptr<TokenDataset> dataset;
  ddp::SamplerOptions sampler{};
  ddp::LoaderOptions loader{};

  TokenLoader open(int rank, int world_size) const {
    return TokenLoader(dataset, ddp::DistributedSampler(dataset->size(), rank, world_size, sampler),
                       at::Device(at::kCPU), loader, TokenCollate(*dataset));
  }
};

Run make_run(const TokenFolder& folder, TokenLayout layout) {
  const auto options = token_options(layout, 16, LongDocuments::Split);
  Run run{std::make_shared<TokenDataset>(folder.open(options, ddp::Split::Test))};
  run.sampler = ddp::eval_sampler_options({});
  run.sampler.shuffle = true;
  run.loader.batch_size = 3;
  return run;
}

// Counts how often each token is a target; the batch's own count must agree.
void count_targets(const TokenBatch& batch, std::map<int64_t, int>& counts) {
  const at::Tensor labels = batch.labels.flatten();
  int64_t num_targets = 0;
  for (int64_t i = 0; i < labels.numel(); ++i) {
    const int64_t label = labels[i].item<int64_t>();
    if (label != models::kIgnoredLabel) {
      ++counts[label];
      ++num_targets;
    }
  }
  CHECK(num_targets == batch.num_targets);
}

Documents mixed_documents() {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 40; ++i) {
    lengths.push_back(3 + i * 11 % 17);
  }
  return numbered(lengths);
}

}  // namespace

TEST_CASE("each target occurs once per epoch, packed or padded, at 1 to 4 ranks", "[tokens]") {
  const Documents documents = mixed_documents();
  const TokenFolder folder(make_parts(documents, answers_after(documents, 2)));
  std::map<int64_t, int> expected;
  for (const int32_t target : targets_of(documents, 2)) {
    expected[target] = 1;
  }
  for (const auto layout : {TokenLayout::Pack, TokenLayout::Pad}) {
    const Run run = make_run(folder, layout);
    for (int world_size = 1; world_size <= 4; ++world_size) {
      std::map<int64_t, int> counts;
      int64_t num_tokens = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        auto loader = run.open(rank, world_size);
        for (auto& batch : loader) {
          count_targets(batch, counts);
          num_tokens += batch.num_tokens;
        }
      }
      INFO("ranks " << world_size);
      CHECK(counts == expected);
      CHECK(num_tokens == run.dataset->statistics().num_tokens);
    }
  }
}

TEST_CASE("token data continues where it stopped, also at another world size", "[tokens]") {
  const Documents documents = mixed_documents();
  const TokenFolder folder(make_parts(documents));
  const Run run = make_run(folder, TokenLayout::Pack);
  auto whole = run.open(0, 1);
  std::map<int64_t, int> counts;
  for (int i = 0; i < 2; ++i) {
    count_targets(whole.next(), counts);
  }
  const auto state = whole.state_dict();

  auto resumed = run.open(0, 1);
  resumed.load_state_dict(state);
  for (int i = 0; i < 12; ++i) {  // into the next epoch
    const TokenBatch expected = whole.next();
    const TokenBatch got = resumed.next();
    CHECK(at::equal(got.input_ids, expected.input_ids));
    CHECK(at::equal(got.labels, expected.labels));
    CHECK(at::equal(got.document_offsets, expected.document_offsets));
  }

  for (int rank = 0; rank < 3; ++rank) {
    auto loader = run.open(rank, 3);
    loader.load_state_dict(state);
    for (auto& batch : loader) {
      count_targets(batch, counts);
    }
  }
  CHECK(static_cast<int64_t>(counts.size()) == run.dataset->statistics().num_targets);
  for (const auto& [label, count] : counts) {
    CHECK(count == 1);
  }
}

TEST_CASE("the embedded samples open, and their answers can be read", "[tokens]") {
  TokenDataOptions options;
  options.path = DDP_SOURCE_DIR "/data/chat-sample";
  options.max_seq_len = 1024;
  const TokenDataset train(options, ddp::Split::Train);
  const TokenDataset eval(options, ddp::Split::Test);
  CHECK(train.statistics().num_documents == 1000);
  CHECK(train.statistics().num_targets_left_out == 0);
  CHECK(train.statistics().padding_share < 0.03);
  CHECK(eval.statistics().num_documents == 100);
  CHECK(train.vocabulary().size() == 1536);
  const auto questions = eval.prompt_references();
  REQUIRE(questions.size() == 100);
  for (const auto& question : questions) {
    const std::string prompt = eval.vocabulary().decode(question.prompt, false);
    const std::string reference = eval.vocabulary().decode(question.reference);
    REQUIRE(prompt.starts_with("<|im_start|>system\nYou call one API"));
    REQUIRE(prompt.ends_with("<|im_end|>\n<|im_start|>assistant\n"));
    REQUIRE(reference.starts_with("<functioncall> {\"name\": "));
    REQUIRE(reference.ends_with("}}"));
    REQUIRE(question.reference.back() == eval.tokenizer().end_of_turn);
  }

  options.path = DDP_SOURCE_DIR "/data/text-sample";
  options.layout = TokenLayout::Stream;
  const TokenDataset text(options, ddp::Split::Test);
  CHECK(text.statistics().num_targets == 12999);
  CHECK(text.tokenizer().vocab_size == 61);
  const auto window = text.get(0).input_ids;
  CHECK_THAT(text.vocabulary().decode({window.begin(), window.end()}),
             Catch::Contains("BRUTUS:\nCaiu"));
}

TEST_CASE("the number of workers changes nothing, and all windows of an epoch have one shift",
          "[tokens]") {
  const TokenFolder folder(make_parts(numbered({400})));
  Run run{std::make_shared<TokenDataset>(folder.open(token_options(TokenLayout::Stream, 16)))};
  run.loader.batch_size = 4;
  run.loader.num_workers = 0;
  auto alone = run.open(1, 2);
  run.loader.num_workers = 3;
  auto threads = run.open(1, 2);
  const int64_t steps = 3 * alone.num_batches();
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t epoch = alone.epoch();
    const TokenBatch a = alone.next();
    const TokenBatch b = threads.next();
    REQUIRE(at::equal(a.input_ids, b.input_ids));
    REQUIRE(at::equal(a.labels, a.input_ids + 1));  // ids are positions in the text
    const int64_t begin = run.dataset->get_for_epoch(0, epoch).input_ids.front();
    CHECK((a.input_ids.select(1, 0) - begin).remainder(16).eq(0).all().item<bool>());
  }
}
