// SPDX-License-Identifier: Apache-2.0
// Token files and vocabularies: their contents, and every kind of error in them.
#include <ATen/ATen.h>

#include <filesystem>
#include <functional>
#include <vector>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/named_pipe.hpp"
#include "tokens/token_file.hpp"
#include "unit/data/tokens/token_test_support.hpp"

using namespace token_test;
using Catch::Contains;
using data_test::message_of;
using ddp::concat;
using ddp::DataError;
using models::Vocabulary;
using models::detail::TokenFile;

namespace {

class File {
 public:
  std::string path() const { return (folder_.path() / "train.safetensors").string(); }
  std::string write(const TokenParts& parts) const {
    parts.write(path());
    return path();
  }

 private:
  data_test::TempFolder folder_;
};

std::string refusal(const File& file) {
  return message_of<DataError>([&] { TokenFile{file.path()}; });
}

const Documents kTwo{{5, 6, 7, 8}, {9, 10}};

struct VocabularyParts {
  at::Tensor bytes =
      at::tensor(std::vector<int32_t>{'a', 'b', 0xC3, 0xA9, '<', 'e', '>'}, at::kInt).to(at::kByte);
  at::Tensor offsets = at::tensor(std::vector<int64_t>{0, 1, 2, 3, 4, 7, 7}, at::kLong);
  at::Tensor special = at::tensor(std::vector<int32_t>{0, 0, 0, 0, 1, 0}, at::kInt).to(at::kByte);
  std::map<std::string, std::string> metadata{{"format", "ddp_vocabulary"},
                                              {"format_version", "1"},
                                              {"vocab_size", "6"},
                                              {"tokenizer", "sha256:a"},
                                              {"end_of_turn", "4"}};

  void write(const std::string& path) const {
    ddp::save_safetensors(path, {{"bytes", bytes}, {"offsets", offsets}, {"special", special}},
                          metadata);
  }
};

}  // namespace

TEST_CASE("a token file has documents, targets and its tokenizer", "[tokens]") {
  const auto dtype = GENERATE(at::kUInt16, at::kInt);
  const File file;
  const TokenFile tokens(file.write(make_parts(kTwo, Documents{{0, 0, 1, 1}, {1, 0}}, dtype)));
  CHECK(tokens.num_tokens() == 6);
  CHECK(tokens.num_documents() == 2);
  CHECK(tokens.document_begin(1) == 4);
  CHECK(tokens.document_length(0) == 4);
  CHECK(tokens.document_of(3) == 0);
  CHECK(tokens.document_of(4) == 1);
  CHECK(tokens.name() == "by hand");
  CHECK(tokens.tokenizer().vocab_size == 1000);
  CHECK(tokens.tokenizer().identity == "sha256:a");
  CHECK(tokens.tokenizer().name == "tiny");
  CHECK(tokens.tokenizer().end_tokens() == std::vector<int64_t>{1, 2});
  std::vector<int32_t> ids(3);
  tokens.copy_tokens(2, 3, ids.data());
  CHECK(ids == std::vector<int32_t>{7, 8, 9});
  REQUIRE(tokens.has_targets());
  CHECK(tokens.count_targets(0, 6) == 3);
  CHECK(tokens.count_targets(1, 2) == 1);
  CHECK(tokens.is_target(4));
  CHECK_FALSE(tokens.is_target(5));
}

TEST_CASE("without marks every token is a target", "[tokens]") {
  const File file;
  auto parts = make_parts(kTwo);
  parts.metadata.erase("end_of_text");
  parts.metadata.erase("end_of_turn");
  const TokenFile tokens(file.write(parts));
  CHECK_FALSE(tokens.has_targets());
  CHECK(tokens.count_targets(1, 4) == 4);
  CHECK(tokens.tokenizer().end_tokens().empty());
  CHECK(tokens.prompt_references(0).empty());
}

TEST_CASE("decoding is compared with the answers of a document", "[tokens]") {
  const File file;
  const Documents ids{{10, 11, 12, 13, 14, 15, 16}, {20, 21, 22}, {30, 31}, {40, 41}};
  const Documents marks{{0, 1, 1, 0, 1, 1, 0}, {0, 0, 1}, {0, 0}, {1, 1}};
  const TokenFile tokens(file.write(make_parts(ids, marks)));
  const auto first = tokens.prompt_references(0);
  REQUIRE(first.size() == 2);
  CHECK(first[0].prompt == std::vector<int64_t>{10});
  CHECK(first[0].reference == std::vector<int64_t>{11, 12});
  CHECK(first[1].document == 0);
  CHECK(first[1].answer == 1);
  CHECK(first[1].prompt == std::vector<int64_t>{10, 11, 12, 13});  // includes the previous answer
  CHECK(first[1].reference == std::vector<int64_t>{14, 15});
  const auto second = tokens.prompt_references(1);
  REQUIRE(second.size() == 1);
  CHECK(second[0].prompt == std::vector<int64_t>{20, 21});
  CHECK(second[0].reference == std::vector<int64_t>{22});
  CHECK(tokens.prompt_references(2).empty());  // no answer
  CHECK(tokens.prompt_references(3).empty());  // no prompt before it
}

TEST_CASE("a token id out of range names file, document and position", "[tokens]") {
  const auto dtype = GENERATE(at::kUInt16, at::kInt);
  const File file;
  file.write(make_parts({{5, 6, 7}, {8, 999, 1000, 3}}, std::nullopt, dtype));
  CHECK_THAT(refusal(file), Contains(file.path()) &&
                                Contains("document 1 has id 1000 at token 2 (5 of the file)") &&
                                Contains("ends at 999"));
  if (dtype == at::kInt) {
    file.write(make_parts({{5, -7}}, std::nullopt, dtype));
    CHECK_THAT(refusal(file), Contains("document 0 has id -7 at token 1"));
  }
}

TEST_CASE("a named pipe is refused as a token file", "[tokens]") {
  const File file;
  const testing::NamedPipe pipe(file.path());
  CHECK_THAT(refusal(file), Contains(file.path() + ": it is not a regular file"));
  CHECK_FALSE(pipe.was_waited_for());
}

TEST_CASE("a truncated or missing token file is a data error that names it", "[tokens]") {
  const File file;
  CHECK_THAT(refusal(file), Contains(file.path()) && Contains("No such file"));
  file.write(make_parts(kTwo));
  const auto size = std::filesystem::file_size(file.path());
  for (const auto cut : {size - 1, size - 9, uintmax_t{40}, uintmax_t{3}, uintmax_t{0}}) {
    std::filesystem::resize_file(file.path(), cut);
    INFO(cut);
    CHECK_THAT(refusal(file), Contains(file.path()) && Contains("prepare it again"));
  }
}

namespace {

struct Damage {
  const char* what;
  std::function<void(TokenParts&)> change;
  const char* message;
};

void check_refused(const std::vector<Damage>& damages) {
  const File file;
  for (const auto& damage : damages) {
    INFO(damage.what);
    TokenParts parts = make_parts(kTwo);
    damage.change(parts);
    file.write(parts);
    CHECK_THAT(refusal(file), Contains(file.path()) && Contains(damage.message));
  }
}

at::Tensor longs(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

}  // namespace

TEST_CASE("a token file of other contents is named for what it is", "[tokens]") {
  const File file;
  for (const auto& [bytes, kind] :
       {std::pair{"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
                  "a Git LFS pointer"},
        std::pair{"<html><body>Sign in</body></html>", "an HTML page"},
        std::pair{"To be, or not to be", "text"}}) {
    data_test::write_file(file.path(), bytes);
    CHECK_THAT(refusal(file), Contains(file.path()) && Contains(concat("it is ", kind)));
  }
}

TEST_CASE("a vocabulary in a link loop is refused, not left out", "[tokens]") {
  const TokenFolder folder(make_parts(kTwo));
  const std::string path = folder.file("vocabulary.safetensors");
  std::filesystem::create_symlink(path, path);
  const auto message =
      message_of<DataError>([&] { (void)folder.open(token_options(models::TokenLayout::Pad, 8)); });
  CHECK_THAT(message, Contains("cannot read " + path));
}

TEST_CASE("metadata that a token file lacks or contradicts are named", "[tokens]") {
  check_refused({
      {"no format", [](auto& p) { p.metadata.erase("format"); }, "format=(none)"},
      {"another format", [](auto& p) { p.metadata["format"] = "pt"; }, "format=pt"},
      {"a later version", [](auto& p) { p.metadata["format_version"] = "2"; }, "reads version 1"},
      {"no vocab_size", [](auto& p) { p.metadata.erase("vocab_size"); }, "lacks 'vocab_size'"},
      {"a bad vocab_size", [](auto& p) { p.metadata["vocab_size"] = "12k"; }, "vocab_size=12k"},
      {"an empty vocabulary", [](auto& p) { p.metadata["vocab_size"] = "0"; }, "vocab_size=0"},
      {"no tokenizer", [](auto& p) { p.metadata.erase("tokenizer"); }, "lacks 'tokenizer'"},
      {"an end beyond", [](auto& p) { p.metadata["end_of_turn"] = "1000"; }, "end_of_turn=1000"},
  });
}

TEST_CASE("tensors that a token file lacks or contradicts are named", "[tokens]") {
  check_refused({
      {"float ids", [](auto& p) { p.tokens = p.tokens.to(at::kFloat); }, "not U16 or I32"},
      {"a matrix",
       [](auto& p) {
         p.tokens = p.tokens.view({2, 3});
       },
       "has 2 dimensions"},
      {"int documents", [](auto& p) { p.documents = p.documents.to(at::kInt); }, "not I64"},
      {"a late start",
       [](auto& p) {
         p.documents = longs({1, 6});
       },
       "from 1 to 6"},
      {"an early end",
       [](auto& p) {
         p.documents = longs({0, 4, 5});
       },
       "from 0 to 5"},
      {"backwards",
       [](auto& p) {
         p.documents = longs({0, 5, 4, 6});
       },
       "document 1 runs from 5 to 4"},
      {"an empty document",
       [](auto& p) {
         p.documents = longs({0, 4, 4, 6});
       },
       "document 1 runs from 4 to 4"},
      {"short marks", [](auto& p) { p.targets = at::ones({5}, at::kByte); }, "not U8 of 6"},
      {"float marks", [](auto& p) { p.targets = at::ones({6}); }, "not U8 of 6"},
      {"no document",
       [](auto& p) {
         p.tokens = p.tokens.slice(0, 0, 0);
         p.documents = longs({0});
       },
       "holds no document"},
  });
  const File file;
  ddp::save_safetensors(file.path(), {{"documents", longs({0})}}, make_parts(kTwo).metadata);
  CHECK_THAT(refusal(file), Contains("no tensor 'tokens'"));
}

TEST_CASE("a vocabulary turns ids into text", "[tokens]") {
  const data_test::TempFolder folder;
  const std::string path = (folder.path() / "vocabulary.safetensors").string();
  VocabularyParts().write(path);
  const Vocabulary vocabulary(path);
  CHECK(vocabulary.size() == 6);
  CHECK(vocabulary.bytes(1) == "b");
  CHECK(vocabulary.bytes(5).empty());
  CHECK(vocabulary.bytes(6) == "\xEF\xBF\xBD");
  CHECK(vocabulary.bytes(-1) == "\xEF\xBF\xBD");
  CHECK(vocabulary.is_special(4));
  CHECK_FALSE(vocabulary.is_special(0));
  CHECK_FALSE(vocabulary.is_special(9));
  CHECK(vocabulary.find("<e>") == 4);
  CHECK_FALSE(vocabulary.find("x"));
  CHECK(vocabulary.decode({0, 4, 2, 3, 1}) ==
        "a\xC3\xA9"
        "b");
  CHECK(vocabulary.decode({0, 4}, /*skip_special=*/false) == "a<e>");
  CHECK(vocabulary.tokenizer().end_tokens() == std::vector<int64_t>{4});
}

TEST_CASE("a damaged vocabulary is refused by name", "[tokens]") {
  const data_test::TempFolder folder;
  const std::string path = (folder.path() / "vocabulary.safetensors").string();
  const auto refused = [&](const VocabularyParts& parts) {
    parts.write(path);
    return message_of<DataError>([&] { Vocabulary{path}; });
  };
  VocabularyParts parts;
  parts.metadata["vocab_size"] = "7";
  CHECK_THAT(refused(parts), Contains(path) && Contains("6 entries") && Contains("is 7"));
  parts = {};
  parts.offsets = at::tensor(std::vector<int64_t>{0, 2, 1, 3, 4, 7, 7}, at::kLong);
  CHECK_THAT(refused(parts), Contains("entry 1 runs from 2 to 1"));
  parts = {};
  parts.special = parts.special.to(at::kLong);
  CHECK_THAT(refused(parts), Contains("not both U8"));
  parts = {};
  parts.metadata["format"] = "ddp_tokens";
  CHECK_THAT(refused(parts), Contains("expected ddp_vocabulary"));
}

TEST_CASE("invalid UTF-8 in a text is replaced", "[tokens]") {
  const std::string mark = "\xEF\xBF\xBD";
  CHECK(models::valid_utf8("plain \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80") ==
        "plain \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80");
  CHECK(models::valid_utf8("a\xC3") == "a" + mark);                 // truncated
  CHECK(models::valid_utf8("\xC0\x80") == mark + mark);             // overlong
  CHECK(models::valid_utf8("\xED\xA0\x80") == mark + mark + mark);  // a surrogate
  CHECK(models::valid_utf8("\xF4\x90\x80\x80x") == mark + mark + mark + mark + "x");
  CHECK(models::valid_utf8("\xE2\x28\xA1") == mark + "(" + mark);
}
