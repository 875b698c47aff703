// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <filesystem>

#include "data/data_file.hpp"
#include "data/image_source.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

bool is_image_name(const fs::path& path) {
  std::string extension = path.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension == ".jpg" || extension == ".jpeg" || extension == ".png";
}

std::vector<fs::path> sorted_entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    paths.push_back(it->path());
  }
  if (error) {
    throw DataError(concat("cannot read folder ", folder.string(), ": ", error.message()));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<fs::path> class_folders(const fs::path& root) {
  std::vector<fs::path> folders;
  for (const fs::path& path : sorted_entries(root)) {
    if (fs::is_directory(path)) {
      folders.push_back(path);
    }
  }
  return folders;
}

class FolderSource : public ImageSource {
 public:
  /// `known` numbers the classes; where it is empty their sorted names do.
  FolderSource(const fs::path& root, std::vector<std::string> known) : names_(std::move(known)) {
    const bool is_open = names_.empty();
    for (const fs::path& folder : class_folders(root)) {
      const std::string name = folder.filename().string();
      if (is_open) {
        names_.push_back(name);
      }
      const auto found = std::find(names_.begin(), names_.end(), name);
      if (found == names_.end()) {
        throw DataError(concat("class folder ", folder.string(),
                               ": the training split has no class of this name"));
      }
      add_class(folder, found - names_.begin());
    }
    if (paths_.empty()) {
      throw DataError(concat("folder ", root.string(),
                             " holds no class folders with .jpg, .jpeg or .png files (layout: "
                             "train/<class>/*.jpg, test/<class>/*.jpg)"));
    }
  }

  int64_t size() const override { return static_cast<int64_t>(paths_.size()); }
  int64_t num_classes() const override { return static_cast<int64_t>(names_.size()); }
  std::vector<std::string> class_names() const override { return names_; }
  int64_t label(int64_t index) const override { return labels_[static_cast<size_t>(index)]; }
  DataSource locate(int64_t index) const override {
    return {paths_[static_cast<size_t>(index)], 0};
  }
  void read(int64_t index, std::vector<uint8_t>& bytes) const override {
    const DataFile file(paths_[static_cast<size_t>(index)]);
    bytes.resize(static_cast<size_t>(file.size()));
    file.read_at(0, bytes.data(), file.size());
  }

 private:
  void add_class(const fs::path& folder, int64_t label) {
    const size_t before = paths_.size();
    add_files(folder, 0);
    if (paths_.size() == before) {
      throw DataError(
          concat("class folder ", folder.string(), " holds no .jpg, .jpeg or .png file"));
    }
    labels_.resize(paths_.size(), label);
  }

  void add_files(const fs::path& folder, int depth) {
    for (const fs::path& path : sorted_entries(folder)) {
      if (fs::is_directory(path) && !fs::is_symlink(path) && depth < 8) {
        add_files(path, depth + 1);
      } else if (is_image_name(path)) {
        paths_.push_back(path.string());
      }
    }
  }

  std::vector<std::string> paths_;
  std::vector<int64_t> labels_;
  std::vector<std::string> names_;
};

}  // namespace

std::string find_split_folder(const std::string& folder, Split split) {
  const std::vector<std::string> names = split == Split::Train
                                             ? std::vector<std::string>{"train"}
                                             : std::vector<std::string>{"test", "val"};
  for (const std::string& name : names) {
    if (fs::is_directory(fs::path(folder) / name)) {
      return (fs::path(folder) / name).string();
    }
  }
  return {};
}

std::unique_ptr<ImageSource> open_folder_source(const std::string& folder, Split split) {
  const std::string root = find_split_folder(folder, split);
  if (root.empty()) {
    throw DataError(concat("data.path=", folder, " has no folder ",
                           split == Split::Train ? "train" : "test or val",
                           " (layout: train/<class>/*.jpg, test/<class>/*.jpg)"));
  }
  // A class that the test split lacks must not renumber the others.
  std::vector<std::string> known;
  const std::string train = find_split_folder(folder, Split::Train);
  if (split == Split::Test && !train.empty()) {
    for (const fs::path& path : class_folders(train)) {
      known.push_back(path.filename().string());
    }
  }
  return std::make_unique<FolderSource>(root, std::move(known));
}

}  // namespace ddp::detail
