// SPDX-License-Identifier: Apache-2.0
// Masks of the embedded text: the shares of BERT, no special tokens, the same for every reader.
#include "models/tokens/token_masking.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>

#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/data/tokens/token_test_support.hpp"

using ddp::Split;
using models::kIgnoredLabel;
using models::TokenLayout;
using models::TokenMasking;
using testing::message_of;

namespace {

models::TokenDataset open_sample(TokenLayout layout = TokenLayout::Pack,
                                 Split split = Split::Train) {
  auto options = token_test::token_options(layout, 64);
  options.path = DDP_SOURCE_DIR "/data/masked-text-sample";
  return models::TokenDataset(options, split);
}

int64_t mask_id(const models::TokenDataset& dataset) {
  return dataset.vocabulary().find("[MASK]").value();
}

}  // namespace

TEST_CASE("15 % of the ordinary tokens are targets: 80 % masked, 10 % random, 10 % kept") {
  const auto dataset = open_sample();
  const auto& vocabulary = dataset.vocabulary();
  const TokenMasking masking(vocabulary, {});
  double ordinary = 0, targets = 0, masked = 0, kept = 0, other = 0;
  std::set<int32_t> drawn;
  for (int64_t row = 0; row < dataset.size(); ++row) {
    const auto plain = dataset.get(row);
    auto example = plain;
    masking.mask(example);
    int64_t in_row = 0;
    for (std::size_t i = 0; i < plain.input_ids.size(); ++i) {
      const auto before = plain.input_ids[i], after = example.input_ids[i];
      const bool is_special = vocabulary.is_special(before);
      ordinary += is_special ? 0 : 1;
      if (example.labels[i] == kIgnoredLabel) {
        REQUIRE(after == before);
        continue;
      }
      REQUIRE_FALSE(is_special);
      REQUIRE(example.labels[i] == before);
      ++in_row;
      if (after == mask_id(dataset)) {
        ++masked;
      } else if (after == before) {
        ++kept;
      } else {
        REQUIRE_FALSE(vocabulary.is_special(after));
        drawn.insert(after);
        ++other;
      }
    }
    REQUIRE(in_row >= 1);
    REQUIRE(in_row <= masking.max_targets(64));
    targets += static_cast<double>(in_row);
  }
  // About 29,000 targets: five standard deviations of a share are below 0.012.
  CHECK(targets > 25000);
  CHECK(std::abs(targets / ordinary - 0.15) < 0.005);
  CHECK(std::abs(masked / targets - 0.8) < 0.012);
  CHECK(std::abs(other / targets - 0.1) < 0.012);
  CHECK(std::abs(kept / targets - 0.1) < 0.012);
  CHECK(drawn.size() > 1500);  // of 2,043 ordinary ids
}

TEST_CASE("a mask depends on seed, epoch and row alone; the evaluation has one") {
  const auto dataset = open_sample();
  const TokenMasking masking(dataset.vocabulary(), {.seed = 3});
  const auto labels_of = [](const models::TokenDataset& from, const TokenMasking& by, int64_t row,
                            int64_t epoch) {
    auto example = from.get_for_epoch(row, epoch);
    by.mask(example);
    return example.labels;
  };
  const auto labels = labels_of(dataset, masking, 7, 2);
  labels_of(dataset, masking, 8, 2);
  CHECK(labels_of(dataset, masking, 7, 2) == labels);
  CHECK(labels_of(dataset, masking, 7, 3) != labels);
  CHECK(labels_of(dataset, TokenMasking(dataset.vocabulary(), {.seed = 4}), 7, 2) != labels);
  const auto eval = open_sample(TokenLayout::Pack, Split::Test);
  CHECK(labels_of(eval, masking, 5, 0) == labels_of(eval, masking, 5, 9));
}

// tests/unit/benchmarks/libddp_batches_test.py expects the same number of the same rows.
TEST_CASE("windows and masks are those that benchmarks/libddp_batches.py computes") {
  const auto dataset = open_sample(TokenLayout::Stream);
  const TokenMasking masking(dataset.vocabulary(), {.seed = 3});
  uint32_t hash = 2166136261U;
  for (const int64_t epoch : {0, 2}) {
    for (const int64_t row : {int64_t{0}, int64_t{7}, dataset.size() - 1}) {
      auto example = dataset.get_for_epoch(row, epoch);
      masking.mask(example);
      for (const auto& ids : {example.input_ids, example.labels}) {
        for (const int32_t id : ids) {
          hash = (hash ^ static_cast<uint32_t>(id)) * 16777619U;
        }
      }
    }
  }
  CHECK(hash == 0xab4d66e6U);
}

TEST_CASE("a batch has a fixed number of target positions, and they hold the labels") {
  const auto dataset = open_sample();
  const auto masking =
      std::make_shared<TokenMasking>(dataset.vocabulary(), models::MaskingOptions{});
  const auto full = std::make_shared<TokenMasking>(dataset.vocabulary(),
                                                   models::MaskingOptions{.full_head = true});
  for (int64_t first = 0; first < 40; first += 4) {
    std::vector<models::TokenExample> examples;
    for (int64_t i = 0; i < 4; ++i) {
      examples.push_back(dataset.get_for_epoch(first + i, 1));
    }
    const auto gathered = models::TokenCollate(dataset, masking)(examples);
    const auto whole = models::TokenCollate(dataset, full)(examples);
    REQUIRE(gathered.labels.sizes() == at::IntArrayRef({4 * 10}));
    REQUIRE(gathered.target_positions.sizes() == gathered.labels.sizes());
    CHECK_FALSE(whole.target_positions.defined());
    CHECK(at::equal(gathered.input_ids, whole.input_ids));
    CHECK(gathered.num_targets == whole.num_targets);
    const auto count = gathered.num_targets;
    CHECK(gathered.labels.ne(kIgnoredLabel).sum().item<int64_t>() == count);
    const auto flat = whole.labels.flatten();
    CHECK(flat.ne(kIgnoredLabel).sum().item<int64_t>() == count);
    const auto places = gathered.target_positions.narrow(0, 0, count);
    CHECK(at::equal(flat.index_select(0, places), gathered.labels.narrow(0, 0, count)));
  }
}

TEST_CASE("masked tokens do not read the padding of their row") {
  for (const auto layout : {TokenLayout::Stream, TokenLayout::Pad}) {
    const auto dataset = open_sample(layout, Split::Test);
    const auto masking =
        std::make_shared<TokenMasking>(dataset.vocabulary(), models::MaskingOptions{});
    const models::TokenCollate collate(dataset, masking);
    const auto last = dataset.size() - 1;  // with Stream the only short row
    const auto length = static_cast<int32_t>(dataset.get(last).input_ids.size());
    REQUIRE(length < 64);
    const auto batch = collate({dataset.get(last), dataset.get(last)});
    REQUIRE(batch.document_offsets.defined());
    CHECK(
        at::equal(batch.document_offsets, at::tensor({0, length, 64, 64 + length, 128}, at::kInt)));
    CHECK(batch.max_document_length == std::max<int64_t>(length, 64 - length));
    const auto row = at::cat({at::arange(length), at::arange(64 - length)});
    CHECK(at::equal(batch.position_ids, row.expand({2, 64})));
    CHECK(batch.num_tokens == 2 * length);
    // A model that reads only tokens before its target needs no such segments.
    CHECK_FALSE(models::TokenCollate(dataset)({dataset.get(last)}).document_offsets.defined());
  }
  const auto dataset = open_sample(TokenLayout::Stream);
  const auto masking =
      std::make_shared<TokenMasking>(dataset.vocabulary(), models::MaskingOptions{});
  const auto full = models::TokenCollate(dataset, masking)({dataset.get(0), dataset.get(1)});
  CHECK(full.num_tokens == 128);
  CHECK_FALSE(full.document_offsets.defined());
}

TEST_CASE("masking refuses other vocabularies and shares") {
  const auto dataset = open_sample();
  const models::Vocabulary chat(DDP_SOURCE_DIR "/data/chat-sample/vocabulary.safetensors");
  CHECK(message_of<ddp::DataError>([&] {
          TokenMasking(chat, {});
        }).find("has no special token [MASK]; fix") != std::string::npos);
  const data_test::TempFolder folder;
  const auto path = (folder.path() / "vocabulary.safetensors").string();
  const auto file = ddp::load_safetensors(dataset.vocabulary().path());
  for (const std::string token : {"[MASK]", "[CLS]", "[SEP]", "[UNK]"}) {
    auto tensors = file.tensors;
    auto special = tensors.at("special").clone();
    special[dataset.vocabulary().find(token).value()] = 0;
    tensors["special"] = special;
    ddp::save_safetensors(path, tensors, file.metadata);
    CHECK(message_of<ddp::DataError>([&] {
            TokenMasking(models::Vocabulary(path), {});
          }).find("has no special token " + token + "; fix") != std::string::npos);
  }
  CHECK(message_of<ddp::SettingsError>([&] {
          TokenMasking(dataset.vocabulary(), {.masked_share = 0});
        }).find("masking.masked_share=0 must lie") != std::string::npos);
}
