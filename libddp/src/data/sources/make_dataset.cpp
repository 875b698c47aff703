// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "data/sources/data_file.hpp"
#include "data/sources/image_dataset.hpp"
#include "data/sources/image_source.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/image_files.hpp"

namespace ddp {

namespace {

constexpr int64_t kSmallImage = 64;  // defaults: CIFAR's up to this size, ImageNet's above

// Mean and standard deviation of the channels, and of luma. The mean of luma follows from the
// channels' means. Its deviation was measured for CIFAR-10's training images: 0.973 of the
// channels' weighted mean, which is also the estimate for CIFAR-100. ImageNet's is the weighted
// mean.
struct Statistics {
  std::array<double, 3> mean, std;
  double grey_mean, grey_std;
};
constexpr Statistics kCifar10{{0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616}, 0.4809, 0.2389};
constexpr Statistics kCifar100{{0.5071, 0.4865, 0.4409}, {0.2673, 0.2564, 0.2762}, 0.4875, 0.2549};
constexpr Statistics kMnist{{0.1307, 0.1307, 0.1307}, {0.3081, 0.3081, 0.3081}, 0.1307, 0.3081};
constexpr Statistics kImageNet{{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}, 0.4590, 0.2256};

// A data set of images of one size in files of its own, which are decoded when it is opened.
struct KnownSet {
  DataFormat format;
  const char* name;
  int64_t image_size;
  int64_t num_classes;
  std::string (*find)(const std::string& folder);
  detail::DecodedImages (*read)(const std::string& folder, Split split);
  const Statistics& statistics;
};
constexpr KnownSet kKnownSets[] = {
    {DataFormat::Cifar10, "cifar10", 32, 10, &detail::find_cifar10, &detail::read_cifar10,
     kCifar10},
    {DataFormat::Cifar100, "cifar100", 32, 100, &detail::find_cifar100, &detail::read_cifar100,
     kCifar100},
    {DataFormat::Mnist, "mnist", 28, 10, &detail::find_mnist, &detail::read_mnist, kMnist}};

const KnownSet* known_set(DataFormat format) {
  const auto* found = std::find_if(std::begin(kKnownSets), std::end(kKnownSets),
                                   [&](const KnownSet& set) { return set.format == format; });
  return found != std::end(kKnownSets) ? found : nullptr;
}

bool has_shards(const std::string& path) {
  return !detail::find_tar_shards(path, Split::Train).empty() ||
         !detail::find_tar_shards(path, Split::Test).empty();
}

// The split's folder may also hold tar shards: class folders decide.
bool has_class_folders(const std::string& path, Split split) {
  const std::string folder = detail::find_split_folder(path, split);
  if (folder.empty()) {
    return false;
  }
  std::error_code unreadable, ignored;
  const std::filesystem::directory_iterator entries(folder, unreadable);
  // Opening an unreadable folder later throws the reason.
  return unreadable || std::any_of(begin(entries), end(entries),
                                   [&](const auto& entry) { return entry.is_directory(ignored); });
}

DataFormat find_format(const std::string& path) {
  std::vector<std::pair<DataFormat, std::string>> found;
  for (const KnownSet& set : kKnownSets) {
    if (!set.find(path).empty()) {
      found.emplace_back(set.format, set.name);
    }
  }
  if (has_shards(path)) {
    found.emplace_back(DataFormat::Tar, "tar");
  }
  if (has_class_folders(path, Split::Train) || has_class_folders(path, Split::Test)) {
    found.emplace_back(DataFormat::Folder, "folder");
  }
  if (found.size() > 1) {
    throw DataError(concat("data.path=", path, " holds files of data.format=", found[0].second,
                           " and of data.format=", found[1].second,
                           "; fix: set data.format to one of them"));
  }
  if (!found.empty()) {
    return found[0].first;
  }
  throw DataError(
      concat("data.path=", path,
             " holds none of the known layouts: CIFAR-10's data_batch_*.bin, CIFAR-100's train.bin "
             "with fine_label_names.txt, MNIST's train-images-idx3-ubyte, train*.tar and "
             "test*.tar, or train/<class>/*.jpg and test/<class>/*.jpg; "
             "fix: set data.path to a folder with one of these layouts (data/README.md)"));
}

std::unique_ptr<detail::ImageSource> open_source(
    const DataOptions& options, Split split, detail::SourcePart part = detail::SourcePart::Whole) {
  return options.format == DataFormat::Tar ? detail::open_tar_source(options.path, split, part)
                                           : detail::open_folder_source(options.path, split, part);
}

bool has_files(DataFormat format) {
  return format == DataFormat::Tar || format == DataFormat::Folder;
}

// The split whose first image determines the size.
Split probed_split(const DataOptions& options) {
  const bool has_train = options.format == DataFormat::Tar
                             ? !detail::find_tar_shards(options.path, Split::Train).empty()
                             : !detail::find_split_folder(options.path, Split::Train).empty();
  return has_train ? Split::Train : Split::Test;
}

// The shorter side of the first image if that image is small, else 224.
int64_t probe_image_size(const DataOptions& options, const detail::ImageSource& source) {
  if (source.size() == 0) {
    return 224;
  }
  std::vector<uint8_t> bytes;
  source.read(0, bytes);
  try {
    const auto header = detail::read_image_header(bytes, source.locate(0), options.max_pixels);
    return std::max(header.width, header.height) <= kSmallImage
               ? std::min(header.width, header.height)
               : 224;
  } catch (const detail::CorruptImage& corrupt) {
    if (options.corrupt == CorruptPolicy::Error) {
      throw detail::with_fix(corrupt);
    }
    throw SettingsError(
        "the first image is corrupt, so its size is unknown; fix: set data.image_size");
  }
}

void check_channels(const char* name, const std::vector<double>& values, int64_t channels,
                    double least) {
  const bool fits =
      std::ssize(values) == channels &&
      std::all_of(values.begin(), values.end(), [&](double v) { return v >= least && v <= 1; });
  if (!fits) {
    throw SettingsError(concat("data.", name, " has ", values.size(), " values; it needs ",
                               channels == 1 ? "1 (grey)" : "3 (red, green, blue)", ", each from ",
                               least, " to 1; fix: set such values, or leave data.", name,
                               " unset"));
  }
}

void check_rand_augment(const DataOptions& o) {
  if (o.rand_augment.ops < 0 || o.rand_augment.ops > detail::kNumAugmentOps) {
    throw SettingsError(concat("data.rand_augment_ops=", o.rand_augment.ops, " must be from 0 to ",
                               detail::kNumAugmentOps, "; fix: set 2, the usual number"));
  }
  if (o.rand_augment.magnitude < 0 || o.rand_augment.magnitude >= detail::kNumMagnitudes) {
    throw SettingsError(concat("data.rand_augment_magnitude=", o.rand_augment.magnitude,
                               " must be from 0 to ", detail::kNumMagnitudes - 1,
                               "; fix: set 9, the usual strength"));
  }
  if (o.rand_augment.ops > 0 && o.augment == Augment::None) {
    throw SettingsError(concat(
        "data.rand_augment_ops=", o.rand_augment.ops,
        " contradicts data.augment=none, which prepares training images as in evaluation; "
        "fix: set data.augment=pad_crop or random_resized_crop, or data.rand_augment_ops=0"));
  }
  if (o.rand_augment.ops > 0 && o.format == DataFormat::Synthetic) {
    throw SettingsError(concat("data.rand_augment_ops=", o.rand_augment.ops,
                               " changes images of bytes, but data.format=synthetic generates "
                               "floats; fix: set data.rand_augment_ops=0"));
  }
}

void check_options(const DataOptions& o) {
  if (o.channels != 1 && o.channels != 3) {
    throw SettingsError(concat("data.channels=", o.channels,
                               " must be 3 (RGB), 1 (grey) or 0 (chosen by data.format); fix: set "
                               "one of these"));
  }
  if (o.num_classes < 0 || o.num_samples < 0 || o.image_size < 1 || o.pad < 0 || o.cutout < 0 ||
      o.max_pixels < 1 || o.seed < 0) {
    throw SettingsError(
        "data: num_classes, num_samples, image_size, pad, cutout, max_pixels and seed "
        "must not be negative");
  }
  const auto& crop = o.random_resized_crop;
  if (crop.min_scale > crop.max_scale || crop.min_scale <= 0) {
    throw SettingsError(concat("data.min_scale=", crop.min_scale,
                               " must be positive and at most data.max_scale=", crop.max_scale));
  }
  if (crop.min_ratio > crop.max_ratio || crop.min_ratio <= 0) {
    throw SettingsError(concat("data.min_ratio=", crop.min_ratio,
                               " must be positive and at most data.max_ratio=", crop.max_ratio));
  }
  if (o.eval_resize < o.image_size) {
    throw SettingsError(concat("data.eval_resize=", o.eval_resize,
                               " is smaller than data.image_size=", o.image_size,
                               ", which is cut from it"));
  }
  if (const KnownSet* set = known_set(o.format); set && o.image_size != set->image_size) {
    throw SettingsError(concat("data.image_size=", o.image_size, " must be ", set->image_size,
                               " with data.format=", set->name));
  }
  check_channels("mean", o.mean, o.channels, 0);
  check_channels("std", o.std, o.channels, 1e-3);
  check_rand_augment(o);
}

void set_statistics(DataOptions& o, const Statistics& statistics) {
  const auto fill = [&](std::vector<double>& values, const auto& colours, double grey) {
    if (!values.empty()) {
      return;
    }
    if (o.channels == 1) {
      values = {grey};
    } else {
      values.assign(colours.begin(), colours.end());
    }
  };
  fill(o.mean, statistics.mean, statistics.grey_mean);
  fill(o.std, statistics.std, statistics.grey_std);
}

bool keeps_decoded(const DataOptions& o, int64_t num_samples) {
  if (o.cache == CachePolicy::Off) {
    return false;
  }
  if (o.cache == CachePolicy::Ram) {
    if (o.image_size > kSmallImage && o.augment == Augment::RandomResizedCrop) {
      throw SettingsError(
          "data.cache=ram keeps images cut to image_size, but data.augment=random_resized_crop "
          "needs whole images; fix: set data.cache=auto");
    }
    return true;
  }
  const int64_t num_bytes = num_samples * o.image_size * o.image_size * 3;
  return o.image_size <= kSmallImage && num_bytes <= o.cache_limit_mb * 1024 * 1024;
}

void require_path(const DataOptions& o) {
  if (o.path.empty() && o.format != DataFormat::Synthetic) {
    throw SettingsError(
        "data.path is empty, possibly from a shell variable that is not set; fix: set "
        "data.path=FOLDER, or data.format=synthetic for synthetic images");
  }
  // The readers of the known sets name the files that they miss.
  const bool looks = o.format == DataFormat::Auto || has_files(o.format);
  if (looks && !detail::path_exists(o.path)) {
    std::error_code ignored;
    throw DataError(concat("data.path=", o.path, " does not exist, seen from the folder ",
                           std::filesystem::current_path(ignored).string(),
                           "; fix: set data.path to a folder of images (data/README.md), for "
                           "example libddp's data/cifar10-sample, or set data.format=synthetic, "
                           "which needs no files"));
  }
}

}  // namespace

void Dataset::write(int64_t, int64_t, float*, int64_t*) const {
  throw InternalError(
      "Dataset::write() is missing; fix: override it in a class that returns a layout()");
}

DataOptions detail::resolve_data_options(const DataOptions& options) {
  options.usage.set();
  DataOptions o = options;
  require_path(o);
  if (o.format == DataFormat::Auto) {
    o.format = find_format(o.path);
  }
  const KnownSet* set = known_set(o.format);
  if (o.image_size == 0 && has_files(o.format)) {
    o.image_size =
        probe_image_size(o, *open_source(o, probed_split(o), detail::SourcePart::Beginning));
  } else if (o.image_size == 0) {
    o.image_size = set ? set->image_size : 224;
  }
  const bool small = o.image_size <= kSmallImage;
  if (o.channels == 0) {
    o.channels = o.format == DataFormat::Mnist ? 1 : 3;
  }
  if (o.num_classes == 0 && !has_files(o.format)) {
    o.num_classes = set ? set->num_classes : 10;
  }
  if (o.augment == Augment::Auto) {
    // A mirrored digit is no digit.
    o.augment = o.format == DataFormat::Mnist ? Augment::None
                : small                       ? Augment::PadCrop
                                              : Augment::RandomResizedCrop;
  }
  if (o.eval_resize == 0) {
    o.eval_resize = small ? o.image_size : o.image_size * 256 / 224;
  }
  set_statistics(o, set ? set->statistics : small ? kCifar10 : kImageNet);
  check_options(o);
  return o;
}

std::shared_ptr<Dataset> make_dataset(const DataOptions& options, Split split) {
  require_path(options);
  DataOptions given = options;
  if (given.format == DataFormat::Auto) {
    given.format = find_format(given.path);
  }
  // Scans a split only once, for the image size and the data set.
  std::unique_ptr<detail::ImageSource> source;
  if (given.image_size == 0 && has_files(given.format) && probed_split(given) == split) {
    source = open_source(given, split);
    given.image_size = probe_image_size(given, *source);
  }
  const DataOptions resolved = detail::resolve_data_options(given);
  const bool train = split == Split::Train;
  if (resolved.format == DataFormat::Synthetic) {
    return detail::make_synthetic_dataset(resolved, split);
  }
  if (const KnownSet* set = known_set(resolved.format)) {
    return std::make_shared<detail::ImageDataset>(set->read(resolved.path, split), set->num_classes,
                                                  resolved, train);
  }
  if (!source) {
    source = open_source(resolved, split);
  }
  if (source->size() == 0) {
    throw DataError(concat("data.path=", resolved.path, " holds no samples in its ",
                           train ? "training" : "test", " split"));
  }
  const bool keep = keeps_decoded(resolved, source->size());
  return std::make_shared<detail::ImageDataset>(std::move(source), resolved, train, keep);
}

std::shared_ptr<Dataset> open_image_files(const DataOptions& options,
                                          const std::vector<std::string>& paths) {
  DataOptions resolved = detail::resolve_data_options(options);
  resolved.num_samples = 0;
  resolved.num_classes = 0;
  resolved.corrupt = CorruptPolicy::Error;  // another file's image would be no answer
  const bool keep = keeps_decoded(resolved, std::ssize(paths));
  return std::make_shared<detail::ImageDataset>(detail::open_file_list(paths), resolved,
                                                /*train=*/false, keep);
}

}  // namespace ddp
