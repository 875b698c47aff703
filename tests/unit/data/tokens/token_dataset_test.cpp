// SPDX-License-Identifier: Apache-2.0
// Rows of every layout and policy, and their collation.
#include <ATen/ATen.h>

#include <numeric>
#include <set>
#include <tuple>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "tokens/document_packing.hpp"
#include "unit/data/tokens/token_test_support.hpp"

using Catch::Contains;
using data_test::message_of;
using namespace token_test;
using ddp::DataError;
using ddp::SettingsError;
using ddp::Split;
using models::LongDocuments;
using models::TokenCollate;
using models::TokenDataOptions;
using models::TokenDataset;
using models::TokenExample;
using models::TokenLayout;

namespace {

using Ids = std::vector<int32_t>;
constexpr int32_t kNo = models::kIgnoredLabel;

Ids labels_of(const TokenDataset& dataset, int64_t epoch = 0) {
  Ids labels;
  for (int64_t row = 0; row < dataset.size(); ++row) {
    for (const int32_t label : dataset.get_for_epoch(row, epoch).labels) {
      if (label != kNo) {
        labels.push_back(label);
      }
    }
  }
  std::sort(labels.begin(), labels.end());
  return labels;
}

std::vector<int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).flatten();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

}  // namespace

TEST_CASE("best-fit packing is tight, uses each item once and is repeatable", "[tokens]") {
  const auto rows = models::detail::pack_best_fit({3, 7, 5, 2, 3, 10}, 10);
  // 10 | 7 + 3 | 5 + 3 + 2: the fullest packing; the later 3 fits only the row of 5.
  CHECK(rows.begin == std::vector<int64_t>{0, 2, 5, 6});
  CHECK(rows.items == std::vector<int64_t>{0, 1, 2, 3, 4, 5});

  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < 5000; ++i) {
    lengths.push_back(20 + (i * 7919) % 400);
  }
  const auto packed = models::detail::pack_best_fit(lengths, 1024);
  std::set<int64_t> seen;
  int64_t total = 0;
  for (size_t row = 0; row + 1 < packed.begin.size(); ++row) {
    int64_t used = 0;
    for (int64_t i = packed.begin[row]; i < packed.begin[row + 1]; ++i) {
      CHECK(seen.insert(packed.items[i]).second);
      CHECK((i == packed.begin[row] || packed.items[i] > packed.items[i - 1]));
      used += lengths[packed.items[i]];
    }
    CHECK((used > 0 && used <= 1024));
    CHECK((row == 0 || packed.items[packed.begin[row]] > packed.items[packed.begin[row - 1]]));
    total += used;
  }
  CHECK(seen.size() == lengths.size());
  const auto num_rows = static_cast<int64_t>(packed.begin.size()) - 1;
  CHECK(num_rows <= (total + 1023) / 1024 + 1);  // short items fill all gaps
  CHECK(models::detail::pack_best_fit(lengths, 1024).items == packed.items);
  CHECK(models::detail::pack_best_fit({}, 8).begin == std::vector<int64_t>{0});
}

TEST_CASE("a packed row holds documents one after another", "[tokens]") {
  const Documents documents{{10, 11, 12}, {20, 21}, {30, 31, 32, 33, 34}};
  const TokenFolder folder(make_parts(documents, Documents{{0, 1, 1}, {0, 1}, {0, 0, 1, 0, 1}}));
  const auto dataset = folder.open(token_options(TokenLayout::Pack, 8));
  REQUIRE(dataset.size() == 2);
  const TokenExample row = dataset.get(0);  // 5 and 3 fill one row, 2 is left
  CHECK(row.input_ids == Ids{10, 11, 12, 30, 31, 32, 33, 34});
  CHECK(row.labels == Ids{11, 12, kNo, kNo, 32, kNo, 34, kNo});
  CHECK(row.positions == Ids{0, 1, 2, 0, 1, 2, 3, 4});
  CHECK(row.doc_lengths == Ids{3, 5});
  CHECK(dataset.get_for_epoch(0, 7).input_ids == row.input_ids);
  CHECK(dataset.get(1).labels == Ids{21, kNo});
  const auto& statistics = dataset.statistics();
  CHECK(statistics.num_documents == 3);
  CHECK(statistics.num_rows == 2);
  CHECK(statistics.num_tokens == 10);
  CHECK(statistics.num_targets == 5);
  CHECK(statistics.num_tokens_left_out == 0);
  CHECK(statistics.padding_share == 1 - 10.0 / 16);
  CHECK_THAT(dataset.summary(), Contains("3 documents in 2 rows of up to 8, 10 tokens, 5 of them "
                                         "targets, 37.50 % padding"));
  CHECK_THAT(dataset.summary(true),
             Contains("3 documents in 2 rows of up to 8, 10 tokens, 37.50 % padding"));
}

TEST_CASE("padding of a packed batch is a separate document", "[tokens]") {
  const Documents documents{{10, 11, 12}, {20, 21}, {30, 31, 32, 33, 34}};
  const TokenFolder folder(make_parts(documents));
  const auto dataset = folder.open(token_options(TokenLayout::Pack, 8));
  const auto batch = TokenCollate(dataset)({dataset.get(1), dataset.get(0)});
  CHECK(batch.input_ids.sizes() == at::IntArrayRef{2, 8});
  CHECK(values(batch.input_ids) ==
        std::vector<int64_t>{20, 21, 0, 0, 0, 0, 0, 0, 10, 11, 12, 30, 31, 32, 33, 34});
  CHECK(values(batch.labels) == std::vector<int64_t>{21, kNo, kNo, kNo, kNo, kNo, kNo, kNo, 11, 12,
                                                     kNo, 31, 32, 33, 34, kNo});
  CHECK(values(batch.position_ids) ==
        std::vector<int64_t>{0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4});
  CHECK(batch.document_offsets.scalar_type() == at::kInt);
  CHECK(values(batch.document_offsets) == std::vector<int64_t>{0, 2, 8, 11, 16});
  CHECK(batch.max_document_length == 6);
  CHECK(batch.num_documents == 3);
  CHECK(batch.num_tokens == 10);
  CHECK(batch.num_targets == 7);
  CHECK(batch.size() == 2);
}

TEST_CASE("padded rows are as long as the batch's longest, in steps of 64", "[tokens]") {
  const Documents documents{{10, 11, 12}, {20, 21}, std::vector<int32_t>(70, 7)};
  const TokenFolder folder(make_parts(documents));
  const auto dataset = folder.open(token_options(TokenLayout::Pad, 100));
  REQUIRE(dataset.size() == 3);
  const TokenCollate collate(dataset);
  const auto batch = collate({dataset.get(1), dataset.get(0)});
  REQUIRE(batch.input_ids.sizes() == at::IntArrayRef{2, 64});
  const auto head = [](const at::Tensor& rows) { return values(rows.slice(1, 0, 4).contiguous()); };
  CHECK(head(batch.input_ids) == std::vector<int64_t>{20, 21, 0, 0, 10, 11, 12, 0});
  CHECK(head(batch.labels) == std::vector<int64_t>{21, kNo, kNo, kNo, 11, 12, kNo, kNo});
  CHECK(batch.input_ids.slice(1, 4).count_nonzero().item<int64_t>() == 0);
  CHECK(batch.labels.slice(1, 4).eq(kNo).all().item<bool>());
  CHECK_FALSE(batch.position_ids.defined());
  CHECK_FALSE(batch.document_offsets.defined());
  CHECK(batch.num_tokens == 5);
  CHECK(batch.num_targets == 3);
  CHECK(batch.num_documents == 2);
  CHECK(collate({dataset.get(2)}).input_ids.size(1) == 100);  // 128 exceeds max_seq_len
}

TEST_CASE("long documents are split, truncated or dropped, and counted", "[tokens]") {
  const Documents documents = numbered({10, 4, 9});
  const TokenFolder folder(make_parts(documents, answers_after(documents, 2)));
  const auto layout = GENERATE(TokenLayout::Pack, TokenLayout::Pad);

  const auto split = folder.open(token_options(layout, 4, LongDocuments::Split));
  CHECK(labels_of(split) == targets_of(documents, 2));
  CHECK(split.statistics().num_long == 2);
  CHECK(split.statistics().num_targets == 8 + 2 + 7);
  CHECK(split.statistics().num_targets_left_out == 0);
  // The last document's ninth token is only the label of the eighth.
  CHECK(split.statistics().num_without_targets == 1);
  CHECK(split.statistics().num_tokens_left_out == 1);
  CHECK_THAT(split.summary(), Contains("2 longer than max_seq_len split"));

  const auto truncate = folder.open(token_options(layout, 4, LongDocuments::Truncate));
  CHECK(labels_of(truncate) == Ids{12, 13, 22, 23, 26, 27});
  CHECK(truncate.statistics().num_long == 2);
  CHECK(truncate.statistics().num_tokens == 12);
  CHECK(truncate.statistics().num_tokens_left_out == 11);
  CHECK(truncate.statistics().num_targets_left_out == 11);
  CHECK_THAT(truncate.summary(), Contains("2 longer than max_seq_len truncated; not in rows: 11 "
                                          "tokens, 11 targets"));
  CHECK_THAT(truncate.summary(true), Catch::EndsWith("not in rows: 11 tokens"));

  const auto drop = folder.open(token_options(layout, 4, LongDocuments::Drop));
  CHECK(labels_of(drop) == Ids{22, 23});
  CHECK(drop.statistics().num_long == 2);
  CHECK(drop.statistics().num_tokens_left_out == 19);
  CHECK_THAT(drop.summary(), Contains("2 longer than max_seq_len dropped"));
}

TEST_CASE("documents without a target are omitted and counted", "[tokens]") {
  const Documents documents = numbered({6, 3, 1});
  // The first document's answer begins after the cut, the last one has no token to predict.
  const TokenFolder folder(make_parts(documents, answers_after(documents, 5)));
  CHECK_THAT(message_of<DataError>([&] { folder.open(token_options(TokenLayout::Pack, 4)); }),
             Contains(folder.file("train.safetensors")) && Contains("gives a target"));
  const auto split = folder.open(token_options(TokenLayout::Pad, 4, LongDocuments::Split));
  REQUIRE(split.size() == 1);
  CHECK(split.get(0).input_ids == Ids{14, 15});
  CHECK(split.get(0).labels == Ids{15, kNo});
  CHECK(split.statistics().num_without_targets == 3);
}

TEST_CASE("num_samples selects the first documents", "[tokens]") {
  const TokenFolder folder(make_parts(numbered({3, 4, 5})));
  auto first = token_options(TokenLayout::Pad, 8);
  first.num_samples = 2;
  CHECK(folder.open(first).size() == 2);
  CHECK(folder.open(first).statistics().num_documents == 2);
  first.num_samples = 99;
  CHECK(folder.open(first).size() == 3);
}

TEST_CASE("windows of a training text shift with the epoch", "[tokens]") {
  const Documents documents = numbered({57, 20, 26});  // 103 tokens, ids 10 … 112
  const TokenFolder folder(make_parts(documents));
  auto stream = token_options(TokenLayout::Stream, 10);
  stream.seed = 3;
  const auto dataset = folder.open(stream);
  REQUIRE(dataset.size() == 9);
  std::set<int32_t> starts;
  for (int64_t epoch = 0; epoch < 60; ++epoch) {
    const int32_t start = dataset.get_for_epoch(0, epoch).input_ids.front();
    CHECK((start >= 10 && start < 20));
    starts.insert(start);
    for (int64_t i = 0; i < dataset.size(); ++i) {
      const TokenExample window = dataset.get_for_epoch(i, epoch);
      REQUIRE(window.input_ids.size() == 10);
      CHECK(window.input_ids.front() == start + 10 * i);
      CHECK(window.labels.back() == window.input_ids.back() + 1);
      CHECK(window.positions.back() == 9);
    }
    CHECK(labels_of(dataset, epoch).size() == 90);  // no duplicates: all ids differ
  }
  CHECK(starts.size() == 10);
  CHECK(dataset.get_for_epoch(0, 5).input_ids == folder.open(stream).get_for_epoch(0, 5).input_ids);
  stream.seed = 4;
  int differing = 0;
  const auto other = folder.open(stream);
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    differing +=
        other.get_for_epoch(0, epoch).input_ids != dataset.get_for_epoch(0, epoch).input_ids;
  }
  CHECK(differing > 10);
  CHECK(dataset.statistics().num_tokens == 90);
  CHECK(dataset.statistics().num_tokens_left_out == 13);
}

TEST_CASE("windows of an evaluation text cover it once", "[tokens]") {
  const TokenFolder folder(make_parts(numbered({57, 46})));
  const auto dataset = folder.open(token_options(TokenLayout::Stream, 10), Split::Test);
  REQUIRE(dataset.size() == 11);
  Ids expected(102);
  std::iota(expected.begin(), expected.end(), 11);
  CHECK(labels_of(dataset) == expected);
  CHECK(labels_of(dataset, 5) == expected);
  CHECK(dataset.get(10).input_ids == Ids{110, 111});
  const auto batch = TokenCollate(dataset)({dataset.get(9), dataset.get(10)});
  CHECK(batch.input_ids.sizes() == at::IntArrayRef{2, 10});
  CHECK(batch.num_tokens == 12);
  CHECK(batch.num_targets == 12);
  CHECK(values(batch.labels[1]) ==
        std::vector<int64_t>{111, 112, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo});
  CHECK_FALSE(batch.document_offsets.defined());
}

TEST_CASE("a short text still gives a window", "[tokens]") {
  for (const int64_t length : {11, 12, 19, 20, 21, 29, 30, 31}) {
    const TokenFolder folder(make_parts(numbered({length})));
    const auto dataset = folder.open(token_options(TokenLayout::Stream, 10));
    INFO(length);
    CHECK(dataset.size() == (length < 30 ? 1 : 2));
    for (int64_t epoch = 0; epoch < 30; ++epoch) {
      const auto last = dataset.get_for_epoch(dataset.size() - 1, epoch);
      CHECK(last.input_ids.size() == 10);
      CHECK(last.labels.back() <= 9 + length);
    }
  }
  const TokenFolder folder(make_parts(numbered({10})));
  CHECK_THAT(message_of<DataError>([&] { folder.open(token_options(TokenLayout::Stream, 10)); }),
             Contains("holds 10 tokens") && Contains("need 11"));
  CHECK(folder.open(token_options(TokenLayout::Stream, 10), Split::Test).size() == 1);
}

TEST_CASE("a model with a smaller vocabulary is refused, one with a larger vocabulary is accepted",
          "[tokens]") {
  const TokenFolder folder(make_parts(numbered({5})));
  const auto dataset = folder.open(token_options(TokenLayout::Pad, 8));
  dataset.require_vocab(1000);
  dataset.require_vocab(1024);
  CHECK_THAT(message_of<DataError>([&] { dataset.require_vocab(999); }),
             Contains("vocabulary of 1000 ids (tiny)") && Contains("model has 999"));
}

TEST_CASE("a vocabulary that belongs to another file is refused", "[tokens]") {
  const TokenFolder folder(make_parts(numbered({5})));
  CHECK_THAT(
      message_of<DataError>([&] { folder.open(token_options(TokenLayout::Pad, 8)).vocabulary(); }),
      Contains("no vocabulary.safetensors"));
  auto save = [&](const std::string& identity) {
    ddp::save_safetensors(folder.file("vocabulary.safetensors"),
                          {{"bytes", at::zeros({1000}, at::kByte)},
                           {"offsets", at::arange(1001, at::kLong)},
                           {"special", at::zeros({1000}, at::kByte)}},
                          {{"format", "ddp_vocabulary"},
                           {"format_version", "1"},
                           {"vocab_size", "1000"},
                           {"tokenizer", identity}});
  };
  save("sha256:a");
  CHECK(folder.open(token_options(TokenLayout::Pad, 8)).vocabulary().size() == 1000);
  save("sha256:b");
  CHECK_THAT(message_of<DataError>([&] { folder.open(token_options(TokenLayout::Pad, 8)); }),
             Contains("sha256:a") && Contains("sha256:b") && Contains("do not belong together"));
}

TEST_CASE("an evaluation split has prompts and references", "[tokens]") {
  // A chat with three assistant turns: the first has no prompt, the last is at the end.
  const Documents documents{
      {10, 11, 12}, {20, 21}, {30, 31, 32}, {40, 41, 42, 43, 44, 45, 46}, {50, 51}};
  const TokenFolder folder(make_parts(
      documents, Documents{{0, 0, 1}, {0, 0}, {0, 1, 1}, {1, 0, 1, 1, 0, 0, 1}, {1, 1}}));
  const auto dataset = folder.open(token_options(TokenLayout::Pad, 8), Split::Test);
  using Ids = std::vector<int64_t>;
  const auto all = dataset.prompt_references();
  const std::vector<std::tuple<int64_t, int64_t, Ids, Ids>> expected{
      {0, 0, {10, 11}, {12}},
      {2, 0, {30}, {31, 32}},
      {3, 1, {40, 41}, {42, 43}},
      {3, 2, {40, 41, 42, 43, 44, 45}, {46}}};
  REQUIRE(all.size() == expected.size());
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(std::tie(all[i].document, all[i].answer, all[i].prompt, all[i].reference) == expected[i]);
  }
  for (int64_t limit = 1; limit <= 5; ++limit) {  // limits answers, not documents
    CHECK(dataset.prompt_references(limit).size() == std::min<size_t>(limit, all.size()));
  }
}

TEST_CASE("ids of a file too long to be read at the start are checked with their row", "[tokens]") {
  // A sparse file: 2^26 + 4 ids, zero except the last ones.
  const data_test::TempFolder folder;
  const int64_t begin = int64_t{1} << 26;
  const std::string shape = std::to_string(begin + 4);
  const std::string end = std::to_string(24 + 2 * (begin + 4));
  std::string header =
      R"({"__metadata__":{"format":"ddp_tokens","format_version":"1","vocab_size":"9","tokenizer":"x"},)"
      R"("documents":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},)"
      R"("tokens":{"dtype":"U16","shape":[)" +
      shape + R"(],"data_offsets":[24,)" + end + "]}}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  const int64_t documents[] = {0, begin, begin + 4};
  const uint16_t last[] = {1, 2, 3, 9};
  const std::string path = (folder.path() / "train.safetensors").string();
  {
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << header;
    out.write(reinterpret_cast<const char*>(documents), sizeof documents);
    out.seekp(static_cast<std::streamoff>(2 * begin), std::ios::cur);
    out.write(reinterpret_cast<const char*>(last), sizeof last);
  }
  auto pad = token_options(TokenLayout::Pad, 8);
  pad.path = folder.path().string();
  const TokenDataset dataset(pad, Split::Train);
  REQUIRE(dataset.size() == 2);
  CHECK(dataset.get(0).input_ids == Ids(8, 0));
  CHECK_THAT(message_of<DataError>([&] { dataset.get(1); }),
             Contains(path) && Contains("document 1 has id 9 at token 3"));
}

TEST_CASE("impossible token settings are refused", "[tokens]") {
  const TokenFolder folder(make_parts(numbered({5})));
  CHECK_THROWS_AS(folder.open(token_options(TokenLayout::Pack, 1)), SettingsError);
  auto negative = token_options(TokenLayout::Pack, 8);
  negative.num_samples = -1;
  CHECK_THROWS_AS(folder.open(negative), SettingsError);
  TokenDataOptions elsewhere;
  elsewhere.path = folder.path() + "/nowhere";
  CHECK_THAT(message_of<DataError>([&] { TokenDataset(elsewhere, Split::Train); }),
             Contains("nowhere/train.safetensors") && Contains("prepare_chat.py"));
}
