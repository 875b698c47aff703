// SPDX-License-Identifier: Apache-2.0
#include "models/pretrained/hf_vocabulary.hpp"
#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

using nlohmann::json;
using testing::message_of;
using testing::TemporaryFolder;
using testing::write_file;
using Entries = std::vector<std::string>;

std::optional<models::HfVocabulary> read(const std::string& name, const json& content) {
  TemporaryFolder folder;
  write_file(folder.file(name), content.dump());
  return models::read_hf_vocabulary(folder.path());
}

json byte_level() {
  return {{"decoder", {{"type", "Sequence"}, {"decoders", {{{"type", "ByteLevel"}}}}}},
          {"model", {{"type", "BPE"}, {"vocab", {{"a", 0}, {"Ġb", 1}, {"Ċ", 2}, {"Ã©", 4}}}}},
          {"added_tokens", {{{"id", 5}, {"content", "<|im_end|>"}, {"special", true}}}}};
}

}  // namespace

TEST_CASE("byte-level tokens stand for bytes, and numbers may have holes") {
  const Entries expected{"a", " b", "\n", "", "é", "<|im_end|>"};
  CHECK(read("tokenizer.json", byte_level())->entries == expected);
  // An added token stands for its text, even if the model has its id, next to byte-level tokens.
  auto more = byte_level();
  more["model"]["vocab"]["東"] = 3;
  more["added_tokens"].push_back({{"id", 1}, {"content", "Ġ"}});
  CHECK(read("tokenizer.json", more)->entries == Entries{"a", "Ġ", "\n", "東", "é", "<|im_end|>"});
  CHECK(read("vocab.json", {{"<|endoftext|>", 1}, {"Ġ\u0100", 0}})->entries ==
        Entries{std::string(" \0", 2), "<|endoftext|>"});
}

TEST_CASE("SentencePiece's tokens stand for bytes") {
  json llama{
      {"decoder",
       {{"type", "Sequence"}, {"decoders", {{{"type", "Replace"}}, {{"type", "ByteFallback"}}}}}},
      {"model", {{"vocab", {{"<s>", 0}, {"<0x0A>", 1}, {"▁the▁", 2}, {"<0xzz>", 3}}}}}};
  CHECK(read("tokenizer.json", llama)->entries == Entries{"<s>", "\n", " the ", "<0xzz>"});
  json unigram{
      {"pre_tokenizer", {{"type", "Metaspace"}}},
      {"model", {{"vocab", json::array({json::array({"<unk>", 0}), json::array({"▁a", -1.5})})}}}};
  CHECK(read("tokenizer.json", unigram)->entries == Entries{"<unk>", " a"});
}

TEST_CASE("WordPiece's tokens stand for their own text") {
  // The decoder replaces characters, but WordPiece's entries are compared as they are.
  const json bert{
      {"decoder", {{"type", "Sequence"}, {"decoders", {{{"type", "Replace"}}}}}},
      {"model",
       {{"type", "WordPiece"}, {"vocab", {{"[PAD]", 0}, {"the", 1}, {"##ing", 2}, {"Ġ▁é", 4}}}}},
      {"added_tokens", {{{"id", 5}, {"content", "[MASK]"}, {"special", true}}}}};
  CHECK(read("tokenizer.json", bert)->entries ==
        Entries{"[PAD]", "the", "##ing", "", "Ġ▁é", "[MASK]"});
}

TEST_CASE("tokenizers that say nothing, and damaged ones") {
  TemporaryFolder folder;
  CHECK_FALSE(models::read_hf_vocabulary(folder.path()));
  json words{{"pre_tokenizer", {{"type", "Whitespace"}}},
             {"model", {{"type", "WordLevel"}, {"vocab", {{"a", 0}}}}}};
  CHECK_FALSE(read("tokenizer.json", words));

  const auto refusal = [](const json& content) {
    return message_of<ddp::ReadError>([&] { read("tokenizer.json", content); });
  };
  auto broken = byte_level();
  for (const json& id : {json(-1), json(1 << 24), json("1"), json(1.5), json(1ull << 63)}) {
    broken["model"]["vocab"]["a"] = id;
    CHECK_THAT(refusal(broken), Catch::Contains("tokenizer.json: key \"model.vocab\" gives") &&
                                    Catch::Contains("the id " + id.dump()) &&
                                    Catch::Contains("expected 0 to 16777215"));
  }
  CHECK_THAT(refusal({{"decoder", {{"type", "ByteLevel"}}}}),
             Catch::Contains("key \"model\" is missing"));
  broken["model"].erase("vocab");
  CHECK_THAT(refusal(broken), Catch::Contains("key \"model.vocab\" is missing"));
  broken["model"]["vocab"] = "none";
  CHECK_THAT(refusal(broken), Catch::Contains("neither an object nor a list"));
  broken["model"]["vocab"] = json::array({json::array({"a", 0}), 7});
  CHECK_THAT(refusal(broken), Catch::Contains("has no token at 1"));
  broken = byte_level();
  broken["added_tokens"].push_back({{"content", "x"}});
  CHECK_THAT(refusal(broken), Catch::Contains("\"added_tokens\" has a token without"));
  write_file(folder.file("tokenizer.json"), "{");
  CHECK_THAT(message_of<ddp::ReadError>([&] { models::read_hf_vocabulary(folder.path()); }),
             Catch::Contains("is not JSON"));
}
