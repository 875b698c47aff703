// SPDX-License-Identifier: Apache-2.0
// Turns text into token files, byte by byte or character by character. Needs no Python.
#include <openssl/evp.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/data/token_dataset.hpp"
#include "ddp/train/command_line.hpp"

namespace {

namespace fs = std::filesystem;

constexpr const char* kUsage = R"(usage: prepare_text FILE [FILE ...] OUT_DIR [options]

Turns text into token files for gpt2_ddp (data/README.md), as data/prepare_text.py does. That script
also trains and reads tokenizers, and cuts files into documents.

  FILE     text, one document each
  OUT_DIR  receives train.safetensors, eval.safetensors and vocabulary.safetensors

  --tokenizer bytes|chars  bytes of any encoding (default), or one id for each character of
                           UTF-8 that occurs
  --eval-fraction F        share of the evaluation split (default: 0.1): the end of a single
                           document, else the last documents
  --version                versions of libddp and of the libraries it uses

Of several documents, each ends with the id of <|endoftext|>.
)";

using Document = std::vector<int32_t>;  // bytes or code points
using Metadata = std::map<std::string, std::string>;

struct Options {
  std::vector<std::string> files;
  std::string folder;
  bool characters = false;
  double eval_fraction = 0.1;
};

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!argument.starts_with("--")) {
      options.files.push_back(argument);
      continue;
    }
    const std::string value = i + 1 < arguments.size() ? arguments[++i] : "";
    char* end = nullptr;
    if (argument == "--tokenizer" && (value == "bytes" || value == "chars")) {
      options.characters = value == "chars";
    } else if (argument == "--eval-fraction") {
      options.eval_fraction = std::strtod(value.c_str(), &end);
      if (value.empty() || *end != '\0' || !(options.eval_fraction > 0) ||
          options.eval_fraction >= 1) {
        throw ddp::SettingsError("--eval-fraction " + value + " must lie between 0 and 1");
      }
    } else {
      throw ddp::SettingsError("unknown argument " + argument + " " + value + "\n" + kUsage);
    }
  }
  if (options.files.size() < 2) {
    throw ddp::SettingsError(std::string("expected FILE and OUT_DIR\n") + kUsage);
  }
  options.folder = options.files.back();
  options.files.pop_back();
  return options;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || !fs::is_regular_file(path)) {
    throw ddp::DataError("cannot read " + path + "; fix: give the path of a text file");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// The code points of `text`. Throws DataError with the line of a character that is not UTF-8.
Document decode_utf8(const std::string& text, const std::string& path) {
  const std::string valid = ddp::valid_utf8(text);
  if (valid != text) {
    const auto bad = std::mismatch(text.begin(), text.end(), valid.begin(), valid.end()).first;
    throw ddp::DataError(ddp::concat(path, ":", 1 + std::count(text.begin(), bad, '\n'),
                                     ": invalid UTF-8; fix: convert it, or --tokenizer bytes"));
  }
  Document points;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte & 0xC0) == 0x80) {
      points.back() = points.back() << 6 | (byte & 0x3F);
    } else {
      points.push_back(byte & (byte < 0x80 ? 0x7F : byte < 0xE0 ? 0x1F : byte < 0xF0 ? 0x0F : 7));
    }
  }
  return points;
}

std::string encode_utf8(int32_t point) {
  if (point < 0x80) {
    return {static_cast<char>(point)};
  }
  std::string text;
  int32_t limit = 0x40;  // of what the first byte can hold
  do {
    text.insert(text.begin(), static_cast<char>(0x80 | (point & 0x3F)));
    point >>= 6;
    limit >>= 1;
  } while (point >= limit);
  text.insert(text.begin(), static_cast<char>((0xFF00 >> (text.size() + 1) & 0xFF) | point));
  return text;
}

Document read_document(const std::string& path, bool characters) {
  const std::string text = read_file(path);
  if (characters) {
    return decode_utf8(text, path);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return {bytes, bytes + text.size()};
}

std::string sha256(const std::string& bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned int size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), hash.data(), &size, EVP_sha256(), nullptr) != 1) {
    throw std::runtime_error("OpenSSL has no SHA-256");
  }
  std::string text = "sha256:";
  for (unsigned int i = 0; i < size; ++i) {
    text += "0123456789abcdef"[hash[i] >> 4];
    text += "0123456789abcdef"[hash[i] & 15];
  }
  return text;
}

struct Vocabulary {
  std::vector<std::string> entries;  // the bytes of each id
  std::vector<int32_t> id_of;        // by code point or byte
  int32_t end = -1;                  // the id of <|endoftext|>, if there is one
  Metadata metadata;
};

Vocabulary make_vocabulary(const std::vector<Document>& documents, bool characters) {
  Vocabulary vocabulary;
  vocabulary.id_of.resize(characters ? 0x110000 : 256, characters ? 0 : 1);
  for (const Document& document : documents) {
    for (const int32_t point : document) {
      vocabulary.id_of[static_cast<std::size_t>(point)] = 1;
    }
  }
  for (std::size_t point = 0; point < vocabulary.id_of.size(); ++point) {
    if (std::exchange(vocabulary.id_of[point], static_cast<int32_t>(vocabulary.entries.size())) !=
        0) {
      vocabulary.entries.push_back(characters ? encode_utf8(static_cast<int32_t>(point))
                                              : std::string(1, static_cast<char>(point)));
    }
  }
  if (documents.size() > 1) {
    vocabulary.end = static_cast<int32_t>(vocabulary.entries.size());
    vocabulary.metadata["end_of_text"] = std::to_string(vocabulary.end);
    vocabulary.entries.emplace_back("<|endoftext|>");
  }
  std::string hashed;
  for (std::size_t i = 0; i < vocabulary.entries.size(); ++i) {
    const auto length = static_cast<uint32_t>(vocabulary.entries[i].size());
    hashed.append(reinterpret_cast<const char*>(&length), sizeof length);
    hashed += vocabulary.entries[i] + (static_cast<int32_t>(i) == vocabulary.end ? '\1' : '\0');
  }
  vocabulary.metadata.insert({{"format_version", "1"},
                              {"vocab_size", std::to_string(vocabulary.entries.size())},
                              {"tokenizer", sha256(hashed)},
                              {"tokenizer_name", characters ? "characters" : "bytes"}});
  return vocabulary;
}

ddp::TensorMap vocabulary_tensors(const Vocabulary& vocabulary) {
  std::vector<int64_t> offsets{0};
  std::vector<uint8_t> bytes;
  for (const std::string& entry : vocabulary.entries) {
    bytes.insert(bytes.end(), entry.begin(), entry.end());
    offsets.push_back(static_cast<int64_t>(bytes.size()));
  }
  auto special = torch::zeros({std::ssize(vocabulary.entries)}, torch::kByte);
  if (vocabulary.end >= 0) {
    special[vocabulary.end] = 1;
  }
  return {{"bytes", torch::tensor(bytes, torch::kByte)},
          {"offsets", torch::tensor(offsets, torch::kLong)},
          {"special", special}};
}

ddp::TensorMap split_tensors(const std::vector<Document>& documents, const Vocabulary& vocabulary) {
  Document tokens;
  std::vector<int64_t> offsets{0};
  for (const Document& document : documents) {
    for (const int32_t point : document) {
      tokens.push_back(vocabulary.id_of[static_cast<std::size_t>(point)]);
    }
    if (vocabulary.end >= 0) {
      tokens.push_back(vocabulary.end);
    }
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  const bool is_small = vocabulary.entries.size() <= 65536;
  return {
      {"tokens", torch::tensor(tokens, torch::kInt).to(is_small ? torch::kUInt16 : torch::kInt)},
      {"documents", torch::tensor(offsets, torch::kLong)}};
}

// Moves the last share of the documents, or of a single one, to the result.
std::vector<Document> take_eval(std::vector<Document>& documents, double fraction) {
  std::vector<Document> eval;
  if (documents.size() > 1) {
    const auto held_out = std::llrint(static_cast<double>(documents.size()) * fraction);
    const auto cut = documents.end() - std::max<int64_t>(1, held_out);
    eval.assign(cut, documents.end());
    documents.erase(cut, documents.end());
    return eval;
  }
  Document& all = documents[0];
  const auto cut =
      all.begin() + static_cast<int64_t>(static_cast<double>(all.size()) * (1 - fraction));
  eval.emplace_back(cut, all.end());
  all.erase(cut, all.end());
  return eval;
}

void write(const Options& options, const Vocabulary& vocabulary,
           const std::vector<std::pair<std::string, std::vector<Document>>>& splits) {
  const fs::path folder(options.folder);
  std::error_code error;
  fs::create_directories(folder, error);  // a failure shows at the first file
  const auto save = [&](const std::string& file, const ddp::TensorMap& tensors, Metadata metadata) {
    metadata.insert(vocabulary.metadata.begin(), vocabulary.metadata.end());
    ddp::save_safetensors((folder / (file + ".safetensors.part")).string(), tensors, metadata);
  };
  save("vocabulary", vocabulary_tensors(vocabulary), {{"format", "ddp_vocabulary"}});
  const std::string name = fs::path(options.files[0]).stem().string();
  for (const auto& [split, documents] : splits) {
    const auto tensors = split_tensors(documents, vocabulary);
    save(split, tensors, {{"format", "ddp_tokens"}, {"name", name + " (" + split + ")"}});
    std::printf("%s.safetensors: %td documents, %lld tokens\n", (folder / split).c_str(),
                std::ssize(documents), static_cast<long long>(tensors.at("tokens").numel()));
  }
  // All files are complete: only a crash between these lines leaves old and new ones together.
  for (const char* file : {"vocabulary", "train", "eval"}) {
    const std::string path = (folder / file).string() + ".safetensors";
    fs::rename(path + ".part", path);
  }
  std::printf("vocabulary: %s, %zu ids, %s\n", vocabulary.metadata.at("tokenizer_name").c_str(),
              vocabulary.entries.size(), vocabulary.metadata.at("tokenizer").c_str());
}

void prepare(const Options& options) {
  std::vector<Document> documents;
  for (const std::string& path : options.files) {
    documents.push_back(read_document(path, options.characters));
  }
  std::erase_if(documents, [](const Document& document) { return document.empty(); });
  if (documents.empty()) {
    throw ddp::DataError(options.files[0] + ": no text: nothing was written");
  }
  const Vocabulary vocabulary = make_vocabulary(documents, options.characters);
  std::vector<Document> eval = take_eval(documents, options.eval_fraction);
  if (documents.empty() || documents[0].empty() || eval[0].empty()) {
    throw ddp::DataError(ddp::concat("the ", eval[0].empty() ? "evaluation" : "training",
                                     " set is empty: nothing was written; fix: another "
                                     "--eval-fraction, or more text"));
  }
  write(options, vocabulary, {{"train", std::move(documents)}, {"eval", std::move(eval)}});
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  try {
    prepare(parse({argv + 1, argv + argc}));
    return 0;
  } catch (const ddp::Error& error) {
    std::fprintf(stderr, "prepare_text: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "prepare_text: %s\n", error.what());
    return static_cast<int>(ddp::ExitCode::UserException);
  }
}
