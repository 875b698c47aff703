// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>

#include "core/log/lower_case.hpp"
#include "data/sources/data_file.hpp"
#include "data/sources/image_source.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 8;  // of folders in a class folder

std::string extension_of(const std::string& name) {
  const auto dot = name.rfind('.');
  return dot == std::string::npos ? "" : lower_case(name.substr(dot + 1));
}

// The name only separates images from other files: some ImageNet files have the wrong extension.
bool is_image_name(const fs::path& folder, const std::string& name) {
  const std::string extension = extension_of(name);
  const FileKind kind = kind_of_extension(extension);
  if (kind == FileKind::UnsupportedImage) {
    throw DataError((folder / name).string() + why_unsupported(extension));
  }
  return kind == FileKind::Image;
}

struct FolderEntry {
  std::string name;
  bool is_folder = false;
  bool is_link = false;
};

// The directory reports each entry's type; only links are followed with a stat.
std::vector<FolderEntry> sorted_entries(const fs::path& folder) {
  std::error_code error;
  std::vector<FolderEntry> entries;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code dangling;
    entries.push_back(
        {it->path().filename().string(), it->is_directory(dangling), it->is_symlink(dangling)});
  }
  if (error) {
    throw DataError(concat("cannot read folder ", folder.string(), ": ", error.message()));
  }
  std::sort(entries.begin(), entries.end(),
            [](const FolderEntry& a, const FolderEntry& b) { return a.name < b.name; });
  return entries;
}

std::vector<std::string> class_names_in(const fs::path& root, LeftOut& left_out) {
  std::vector<std::string> names;
  for (FolderEntry& entry : sorted_entries(root)) {
    if (entry.is_folder) {
      names.push_back(std::move(entry.name));
    } else {
      left_out.add("files outside class folders", entry.name,
                   kind_of_extension(extension_of(entry.name)) != FileKind::Other);
    }
  }
  return names;
}

// Image files in the file system.
class FileSource : public ImageSource {
 public:
  int64_t size() const override { return static_cast<int64_t>(paths_.size()); }
  DataSource locate(int64_t index) const override {
    return {paths_[static_cast<size_t>(index)], 0};
  }
  void read(int64_t index, std::vector<uint8_t>& bytes) const override {
    const DataFile file(paths_[static_cast<size_t>(index)]);
    bytes.resize(static_cast<size_t>(file.size()));
    file.read_at(0, bytes.data(), file.size());
  }

 protected:
  std::vector<std::string> paths_;
};

class FileList : public FileSource {
 public:
  explicit FileList(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      const auto type = file_type_of(path);
      if (type == fs::file_type::not_found) {
        throw DataError(concat("the image file ", path, " does not exist; fix: check the path"));
      }
      if (type == fs::file_type::directory) {
        throw DataError(concat(path, " is a folder, not an image file; fix: name the files in it"));
      }
    }
    paths_ = paths;
  }
  int64_t num_classes() const override { return size(); }
  int64_t label(int64_t index) const override { return index; }
  const char* corrupt_fix() const override {
    return "; fix: leave the file out, or convert it to a good JPEG, PNG or WebP image";
  }
};

class FolderSource : public FileSource {
 public:
  /// `known` numbers the classes; if empty, their sorted names do.
  FolderSource(const fs::path& root, std::vector<std::string> known, SourcePart part,
               LeftOut& left_out)
      : names_(std::move(known)), part_(part) {
    const std::vector<std::string> folders = class_names_in(root, left_out);
    if (names_.empty()) {
      names_ = folders;
    }
    for (const std::string& name : folders) {
      const auto found = std::lower_bound(names_.begin(), names_.end(), name);
      if (found == names_.end() || *found != name) {
        throw DataError(
            concat("class folder ", (root / name).string(),
                   ": the training split has no class of this name; fix: add it there"));
      }
      add_class(root / name, found - names_.begin(), left_out);
      if (is_enough()) {
        break;
      }
    }
    if (paths_.empty()) {
      throw DataError(
          concat("folder ", root.string(),
                 " holds no class folders with .jpg, .jpeg, .png or .webp files (layout: "
                 "train/<class>/*.jpg, test/<class>/*.jpg)"));
    }
  }

  int64_t num_classes() const override { return static_cast<int64_t>(names_.size()); }
  std::vector<std::string> class_names() const override { return names_; }
  int64_t label(int64_t index) const override { return labels_[static_cast<size_t>(index)]; }

 private:
  void add_class(const fs::path& folder, int64_t label, LeftOut& left_out) {
    const size_t before = paths_.size();
    add_files(folder, 0, left_out);
    if (paths_.size() == before) {
      throw DataError(
          concat("class folder ", folder.string(), " holds no .jpg, .jpeg, .png or .webp file"));
    }
    labels_.resize(paths_.size(), label);
  }

  void add_files(const fs::path& folder, int depth, LeftOut& left_out) {
    for (const FolderEntry& entry : sorted_entries(folder)) {
      const fs::path path = folder / entry.name;
      if (entry.is_folder && entry.is_link) {
        left_out.add("linked folders inside class folders", path.string(), true);
      } else if (entry.is_folder && depth == kMaxDepth) {
        left_out.add(concat("folders more than ", kMaxDepth, " below their class folder"),
                     path.string(), true);
      } else if (entry.is_folder) {
        add_files(path, depth + 1, left_out);
      } else if (is_image_name(folder, entry.name)) {
        paths_.push_back(path.string());
      } else {
        left_out.add("files with other extensions", path.string(), false);
      }
      if (is_enough()) {
        return;
      }
    }
  }

  bool is_enough() const { return part_ == SourcePart::Beginning && !paths_.empty(); }

  std::vector<int64_t> labels_;
  std::vector<std::string> names_;
  SourcePart part_;
};

}  // namespace

std::unique_ptr<ImageSource> open_file_list(const std::vector<std::string>& paths) {
  return std::make_unique<FileList>(paths);
}

std::string find_split_folder(const std::string& folder, Split split) {
  const std::vector<std::string> names = split == Split::Train
                                             ? std::vector<std::string>{"train"}
                                             : std::vector<std::string>{"test", "val"};
  for (const std::string& name : names) {
    if (file_type_of(fs::path(folder) / name) == fs::file_type::directory) {
      return (fs::path(folder) / name).string();
    }
  }
  return {};
}

std::unique_ptr<ImageSource> open_folder_source(const std::string& folder, Split split,
                                                SourcePart part) {
  const std::string root = find_split_folder(folder, split);
  if (root.empty()) {
    throw DataError(concat("data.path=", folder, " has no folder ",
                           split == Split::Train ? "train" : "test or val",
                           " (layout: train/<class>/*.jpg, test/<class>/*.jpg)"));
  }
  // A class missing in the test split must not renumber the others.
  std::vector<std::string> known;
  const std::string train = find_split_folder(folder, Split::Train);
  if (split == Split::Test && !train.empty()) {
    LeftOut of_training;
    known = class_names_in(train, of_training);
  }
  LeftOut left_out;
  const fs::path other = fs::path(folder) / "val";
  if (split == Split::Test && root != other && path_exists(other)) {
    left_out.add("folders of a second test split", other.string(), true);
  }
  auto source = std::make_unique<FolderSource>(root, std::move(known), part, left_out);
  if (part == SourcePart::Whole) {
    left_out.log(root);
  }
  return source;
}

}  // namespace ddp::detail
