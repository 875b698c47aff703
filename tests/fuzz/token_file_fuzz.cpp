// SPDX-License-Identifier: Apache-2.0
// A file of tokens, or a vocabulary (safetensors_case.hpp).
#include "fuzz/fuzz.hpp"
#include "fuzz/safetensors_case.hpp"
#include "models/tokens/token_dataset.hpp"
#include "tokens/token_file.hpp"

namespace {

void read_tokens(const std::string& path) {
  const models::detail::TokenFile file(path);
  std::vector<int32_t> ids(static_cast<std::size_t>(file.num_tokens()));
  file.copy_tokens(0, file.num_tokens(), ids.data());
  for (const int32_t id : ids) {
    fuzz::require(id >= 0 && id < file.tokenizer().vocab_size, "ids lie in the vocabulary");
  }
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < file.num_documents(); ++i) {
    fuzz::require(file.document_of(file.document_begin(i)) == i,
                  "a document holds its first token");
    fuzz::require(file.document_length(i) > 0, "no document is empty");
    num_tokens += file.document_length(i);
    for (const auto& part : file.prompt_references(i)) {
      fuzz::require(!part.prompt.empty() && !part.reference.empty(), "a prompt has an answer");
    }
  }
  fuzz::require(num_tokens == file.num_tokens(), "documents hold all tokens");
  fuzz::require(file.count_targets(0, num_tokens) <= num_tokens, "targets are tokens");
}

void read_vocabulary(const std::string& path) {
  const models::Vocabulary vocabulary(path);
  std::vector<int64_t> ids;
  std::string text;
  for (int64_t id = 0; id < std::min<int64_t>(vocabulary.size(), 1000); ++id) {
    ids.push_back(id);
    text += vocabulary.bytes(id);
    fuzz::require(vocabulary.find(vocabulary.bytes(id)) <= id, "an entry is found");
  }
  fuzz::require(vocabulary.decode(ids, /*skip_special=*/false) == text, "ids become their bytes");
  const auto valid = models::valid_utf8(text);
  fuzz::require(models::valid_utf8(valid) == valid, "a corrected text is UTF-8");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto path =
      fuzz::write_file("input.safetensors", fuzz::safetensors_file(fuzz::view(data, size)));
  (void)fuzz::accepts([&] { read_tokens(path); });
  (void)fuzz::accepts([&] { read_vocabulary(path); });
  return 0;
}
