// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <regex>
#include <tuple>

#include "data/data_file.hpp"
#include "data/image_source.hpp"
#include "data/tar_index.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

struct Sample {
  uint32_t shard;
  uint32_t num_bytes;
  int64_t offset;
  int64_t label;
};

// WebDataset: the key ends at the first dot of the name's last part.
void split_name(const std::string& name, std::string& key, std::string& extension) {
  const size_t slash = name.rfind('/');
  const size_t dot = name.find('.', slash == std::string::npos ? 0 : slash + 1);
  key = name.substr(0, dot);
  extension = dot == std::string::npos ? "" : name.substr(dot + 1);
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
}

// Empty if the file does not exist.
std::vector<std::string> read_class_names(const fs::path& path) {
  return fs::exists(path) ? read_names(path.string()) : std::vector<std::string>();
}

int64_t read_label(const DataFile& file, const TarEntry& entry) {
  std::string text(static_cast<size_t>(std::min<int64_t>(entry.size, 16)), '\0');
  file.read_at(entry.offset, text.data(), static_cast<int64_t>(text.size()));
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) {
    text.pop_back();
  }
  const bool digits =
      !text.empty() && text.size() <= 9 &&
      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) {
    throw DataError(concat("tar archive ", file.path(), " at offset ", entry.offset, ": ",
                           entry.name, " must hold a decimal label", kDataFileFix));
  }
  return std::stoll(text);
}

// The folder of KEY.jpg in the archive; empty at the top.
std::string parent_of(const std::string& key) {
  const size_t slash = key.rfind('/');
  if (slash == std::string::npos) {
    return {};
  }
  const size_t before = slash == 0 ? std::string::npos : key.rfind('/', slash - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return key.substr(begin, slash - begin);
}

class TarSource : public ImageSource {
 public:
  TarSource(const std::vector<std::string>& shards, std::vector<std::string> class_names,
            SourcePart part)
      : class_names_(std::move(class_names)) {
    for (const std::string& path : shards) {
      files_.emplace_back(path);
      add_shard(static_cast<uint32_t>(files_.size() - 1));
      if (part == SourcePart::Beginning && !samples_.empty()) {
        break;
      }
    }
    label_by_folder();
  }

  int64_t size() const override { return static_cast<int64_t>(samples_.size()); }
  /// The number of listed classes, else the largest label + 1.
  int64_t num_classes() const override {
    return class_names_.empty() ? largest_label_ + 1 : std::ssize(class_names_);
  }
  std::vector<std::string> class_names() const override { return class_names_; }
  int64_t label(int64_t index) const override { return samples_[static_cast<size_t>(index)].label; }
  DataSource locate(int64_t index) const override {
    const Sample& sample = samples_[static_cast<size_t>(index)];
    return {files_[sample.shard].path(), sample.offset};
  }
  void read(int64_t index, std::vector<uint8_t>& bytes) const override {
    const Sample& sample = samples_[static_cast<size_t>(index)];
    bytes.resize(sample.num_bytes);
    files_[sample.shard].read_at(sample.offset, bytes.data(), sample.num_bytes);
  }

 private:
  // Files of a sample are consecutive; other extensions are ignored.
  struct Group {
    std::string key;
    std::optional<TarEntry> image;
    std::optional<int64_t> label;
  };

  void add_shard(uint32_t shard) {
    const DataFile& file = files_[shard];
    Group group;
    std::string key, extension;
    for (TarEntry& entry : read_tar_index(file)) {
      split_name(entry.name, key, extension);
      if (key != group.key) {
        add_sample(shard, group);
        group = {.key = key, .image = std::nullopt, .label = std::nullopt};
      }
      if (extension == "cls") {
        group.label = read_label(file, entry);
      } else if (const FileKind kind = kind_of_extension(extension); kind == FileKind::Image) {
        group.image = std::move(entry);
      } else if (kind == FileKind::UnsupportedImage) {
        throw DataError(concat("tar archive ", file.path(), " at offset ", entry.offset, ": ",
                               entry.name, why_unsupported(extension)));
      }
    }
    add_sample(shard, group);
  }

  void add_sample(uint32_t shard, const Group& group) {
    if (!group.image) {
      return;
    }
    const TarEntry& image = *group.image;
    int64_t label = group.label.value_or(-1);
    if (!group.label) {
      const std::string folder = parent_of(group.key);
      if (folder.empty()) {
        throw DataError(concat("tar archive ", files_[shard].path(), " at offset ", image.offset,
                               ": ", image.name, " has neither a file ", group.key,
                               ".cls nor a class folder"));
      }
      const auto [place, added] =
          folders_.try_emplace(folder, static_cast<int64_t>(folders_.size()));
      label = -1 - place->second;  // resolved when all folders are known
    }
    if (image.size > INT32_MAX) {
      throw DataError(concat("tar archive ", files_[shard].path(), " at offset ", image.offset,
                             ": ", image.name, " has ", image.size, " bytes; the limit is 2 GiB"));
    }
    samples_.push_back({shard, static_cast<uint32_t>(image.size), image.offset, label});
    largest_label_ = std::max(largest_label_, label);
  }

  // Classes are numbered in the order of classes.txt, else by sorted name.
  void label_by_folder() {
    if (folders_.empty()) {
      return;
    }
    if (class_names_.empty()) {
      for (const auto& [name, order] : folders_) {
        class_names_.push_back(name);
      }
    }
    std::vector<int64_t> label_of(folders_.size());
    for (const auto& [name, order] : folders_) {
      const auto found = std::find(class_names_.begin(), class_names_.end(), name);
      if (found == class_names_.end()) {
        throw DataError(concat("tar archive ", files_.front().path(), ": class ", name,
                               " is not in classes.txt of the same folder; fix: add it there"));
      }
      label_of[static_cast<size_t>(order)] = found - class_names_.begin();
    }
    for (Sample& sample : samples_) {
      if (sample.label < 0) {
        sample.label = label_of[static_cast<size_t>(-1 - sample.label)];
      }
    }
  }

  std::vector<std::string> class_names_;
  std::map<std::string, int64_t> folders_;  // values: order of first occurrence
  std::vector<DataFile> files_;
  std::vector<Sample> samples_;
  int64_t largest_label_ = -1;
};

// A name that ends in a number, optionally followed by "-of-00128".
struct NumberedName {
  std::string before, digits, total;
  std::string with(int64_t number) const {
    std::string text = std::to_string(number);
    text.insert(0, digits.size() - std::min(digits.size(), text.size()), '0');
    return before + text + (total.empty() ? "" : "-of-" + total) + ".tar";
  }
};

std::optional<NumberedName> numbered(const std::string& shard) {
  static const std::regex pattern("(.*?)([0-9]{1,9})(?:-of-([0-9]{1,9}))?[.]tar");
  std::smatch match;
  if (!std::regex_match(shard, match, pattern)) {
    return std::nullopt;
  }
  return NumberedName{match[1], match[2], match[3]};
}

// Only zero-padded numbers are a sequence ("train-000.tar"; "train2017.tar" is a name). With a
// total, counting may also start at 1. Without a total, missing shards at the end cannot be
// detected.
void require_whole_sequences(const std::vector<std::string>& shards) {
  std::map<std::tuple<std::string, size_t, std::string>, std::vector<NumberedName>> sequences;
  for (const auto& shard : shards) {
    if (auto name = numbered(shard)) {
      sequences[{name->before, name->digits.size(), name->total}].push_back(std::move(*name));
    }
  }
  for (const auto& [key, names] : sequences) {  // names are sorted, as shards are
    const auto& first = names.front();
    if (first.digits.front() != '0' && first.total.empty()) {
      continue;
    }
    const int64_t total = first.total.empty() ? 0 : std::stoll(first.total);
    const int64_t last = std::stoll(names.back().digits);
    const int64_t begin = total > 0 && last == total ? 1 : 0;
    const int64_t end = std::max(begin + total, last + 1);
    for (int64_t number = begin; number < end; ++number) {
      const auto place = static_cast<size_t>(number - begin);
      if (place >= names.size() || std::stoll(names[place].digits) != number) {
        throw DataError(concat("tar archive ", first.with(number), " is missing: the folder has ",
                               names.size(), " of the ", end - begin, " shards of this numbering",
                               kDataFileFix, ", or renumber the shards"));
      }
    }
  }
}

}  // namespace

std::vector<std::string> find_tar_shards(const std::string& folder, Split split) {
  std::vector<std::string> shards;
  std::error_code ignored;
  auto collect = [&](const fs::path& place, const std::vector<std::string>& prefixes) {
    for (const auto& entry : fs::directory_iterator(place, ignored)) {
      const std::string name = entry.path().filename().string();
      const bool wanted = std::any_of(prefixes.begin(), prefixes.end(),
                                      [&](const std::string& p) { return name.starts_with(p); });
      if (wanted && entry.path().extension() == ".tar") {
        shards.push_back(entry.path().string());
      }
    }
  };
  if (split == Split::Train) {
    collect(folder, {"train"});
    collect(fs::path(folder) / "train", {""});
  } else {
    collect(folder, {"test", "val"});
    for (const char* name : {"test", "val"}) {
      if (shards.empty()) {
        collect(fs::path(folder) / name, {""});
      }
    }
  }
  std::sort(shards.begin(), shards.end());
  return shards;
}

std::unique_ptr<ImageSource> open_tar_source(const std::string& folder, Split split,
                                             SourcePart part) {
  const auto shards = find_tar_shards(folder, split);
  if (shards.empty()) {
    throw DataError(concat("data.path=", folder, " holds no ",
                           split == Split::Train ? "train*.tar" : "test*.tar or val*.tar",
                           " (data/README.md describes the layout)"));
  }
  require_whole_sequences(shards);
  return std::make_unique<TarSource>(shards, read_class_names(fs::path(folder) / "classes.txt"),
                                     part);
}

}  // namespace ddp::detail
