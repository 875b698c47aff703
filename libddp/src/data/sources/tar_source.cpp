// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <regex>
#include <tuple>

#include "core/log/lower_case.hpp"
#include "data/sources/data_file.hpp"
#include "data/sources/image_source.hpp"
#include "data/sources/tar_index.hpp"
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
  extension = dot == std::string::npos ? "" : lower_case(name.substr(dot + 1));
}

// AppleDouble files ("._KEY.jpg") and other hidden ones. They belong to no sample.
bool is_hidden(const std::string& name) {
  return name[name.rfind('/') + 1] == '.';
}

// Empty if the file does not exist.
std::vector<std::string> read_class_names(const fs::path& path) {
  return path_exists(path) ? read_names(path.string()) : std::vector<std::string>();
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
            SourcePart part, LeftOut& left_out)
      : class_names_(std::move(class_names)) {
    for (const std::string& path : shards) {
      files_.emplace_back(path);
      add_shard(static_cast<uint32_t>(files_.size() - 1), left_out);
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
  // Files of a sample are consecutive.
  struct Group {
    std::string key;
    std::optional<TarEntry> image = std::nullopt;
    std::optional<TarEntry> label = std::nullopt;
  };

  // Of a class folder.
  struct FirstImage {
    int64_t order;  // among those of all folders
    std::string archive;
    int64_t offset;
  };

  [[noreturn]] static void fail(const DataFile& file, const TarEntry& entry,
                                const std::string& why) {
    throw DataError(
        concat("tar archive ", file.path(), " at offset ", entry.offset, ": ", entry.name, why));
  }

  void add_shard(uint32_t shard, LeftOut& left_out) {
    const DataFile& file = files_[shard];
    Group group;
    std::string key, extension;
    for (TarEntry& entry : read_tar_index(file)) {
      if (is_hidden(entry.name)) {
        left_out.add("hidden files", entry.name, false);
        continue;
      }
      split_name(entry.name, key, extension);
      if (key != group.key) {
        add_sample(shard, group);
        group = {.key = key};
      }
      const FileKind kind = kind_of_extension(extension);
      if (extension == "cls" || kind == FileKind::Image) {
        auto& place = extension == "cls" ? group.label : group.image;
        if (place) {
          fail(file, entry,
               concat(" is the second file of its kind in the sample ", key,
                      "; fix: give each sample a name of its own"));
        }
        place = std::move(entry);
      } else if (kind == FileKind::UnsupportedImage) {
        fail(file, entry, why_unsupported(extension));
      } else if (kind_of_extension(extension.substr(extension.rfind('.') + 1)) != FileKind::Other) {
        left_out.add("images with a second dot in their names", entry.name, true);
      } else {
        left_out.add("files with other extensions", entry.name, false);
      }
    }
    add_sample(shard, group);
  }

  void add_sample(uint32_t shard, const Group& group) {
    const DataFile& file = files_[shard];
    if (!group.image && group.label) {
      fail(file, *group.label,
           concat(" labels no image: no ", group.key,
                  ".jpg, .jpeg, .png or .webp is next to it in the archive; fix: write the files "
                  "of a sample one after the other, as tar does with sorted names"));
    }
    if (!group.image) {
      return;
    }
    const TarEntry& image = *group.image;
    if (image.size > INT32_MAX) {
      fail(file, image, concat(" has ", image.size, " bytes; the limit is 2 GiB"));
    }
    const int64_t label =
        group.label ? read_label(file, *group.label) : folder_label(file, image, group.key);
    samples_.push_back({shard, static_cast<uint32_t>(image.size), image.offset, label});
    largest_label_ = std::max(largest_label_, label);
    // A label that was lost would make its image one of the folder's class.
    if (!folders_.empty() && largest_label_ >= 0) {
      fail(file, image,
           concat(group.label ? " has" : " lacks", " a file ", group.key,
                  ".cls, unlike the samples before it; fix: label all samples by .cls, or all by "
                  "their folder"));
    }
  }

  // The class folder's place in folders_ as -1, -2, …, which label_by_folder() resolves.
  int64_t folder_label(const DataFile& file, const TarEntry& image, const std::string& key) {
    const std::string folder = parent_of(key);
    if (folder.empty()) {
      fail(file, image, concat(" has neither a file ", key, ".cls nor a class folder"));
    }
    const auto [place, added] =
        folders_.try_emplace(folder, FirstImage{std::ssize(folders_), file.path(), image.offset});
    return -1 - place->second.order;
  }

  // Classes are numbered in the order of classes.txt, else by sorted name.
  void label_by_folder() {
    if (folders_.empty()) {
      return;
    }
    if (class_names_.empty()) {
      for (const auto& [name, first] : folders_) {
        class_names_.push_back(name);
      }
    }
    std::vector<int64_t> label_of(folders_.size());
    for (const auto& [name, first] : folders_) {
      const auto found = std::find(class_names_.begin(), class_names_.end(), name);
      if (found == class_names_.end()) {
        throw DataError(concat("tar archive ", first.archive, " at offset ", first.offset,
                               ": class ", name,
                               " is not in classes.txt of the same folder; fix: add it there"));
      }
      label_of[static_cast<size_t>(first.order)] = found - class_names_.begin();
    }
    for (Sample& sample : samples_) {
      if (sample.label < 0) {
        sample.label = label_of[static_cast<size_t>(-1 - sample.label)];
      }
    }
  }

  std::vector<std::string> class_names_;
  std::map<std::string, FirstImage> folders_;
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

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

std::vector<std::string> find_tar_shards(const std::string& folder, Split split,
                                         LeftOut* left_out) {
  std::vector<std::string> shards;
  std::error_code ignored;
  auto collect = [&](const fs::path& place, const std::string& prefix, bool wanted) {
    for (const auto& entry : fs::directory_iterator(place, ignored)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(prefix) || entry.is_directory(ignored)) {
        continue;
      }
      const bool is_hidden = name.starts_with(".");
      const bool is_shard = !is_hidden && entry.path().extension() == ".tar";
      if (wanted && is_shard) {
        shards.push_back(entry.path().string());
      } else if (left_out != nullptr) {
        const bool is_archive = contains(name, ".tar") || contains(name, ".tgz");
        left_out->add(is_shard ? "shards of a second test split" : "files that are no .tar shards",
                      entry.path().string(), !is_hidden && is_archive);
      }
    }
  };
  if (split == Split::Train) {
    collect(folder, "train", true);
    collect(fs::path(folder) / "train", "", true);
  } else {
    for (const char* name : {"test", "val"}) {
      for (const bool is_folder : {false, true}) {
        const bool wanted = shards.empty();
        is_folder ? collect(fs::path(folder) / name, "", wanted) : collect(folder, name, wanted);
      }
    }
  }
  std::sort(shards.begin(), shards.end());
  return shards;
}

std::unique_ptr<ImageSource> open_tar_source(const std::string& folder, Split split,
                                             SourcePart part) {
  LeftOut left_out;
  const auto shards = find_tar_shards(folder, split, &left_out);
  if (shards.empty()) {
    throw DataError(concat("data.path=", folder, " holds no ",
                           split == Split::Train ? "train*.tar" : "test*.tar or val*.tar",
                           " (data/README.md describes the layout)"));
  }
  require_whole_sequences(shards);
  auto source = std::make_unique<TarSource>(
      shards, read_class_names(fs::path(folder) / "classes.txt"), part, left_out);
  if (part == SourcePart::Whole) {
    left_out.log(
        concat("data.path=", folder, " (", split == Split::Train ? "training" : "test", " split)"));
  }
  return source;
}

}  // namespace ddp::detail
