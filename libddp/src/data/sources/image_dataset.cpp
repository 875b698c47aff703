// SPDX-License-Identifier: Apache-2.0
#include "data/sources/image_dataset.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "data/sources/data_file.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {

namespace {

int64_t num_used(const DataOptions& options, int64_t size, bool train) {
  if (options.num_samples > size) {
    log_warning(concat("data.num_samples=", options.num_samples, ", but the ",
                       train ? "training" : "test", " split of data.path=", options.path, " has ",
                       size, " samples: all ", size, " are used"));
  }
  return options.num_samples > 0 ? std::min(options.num_samples, size) : size;
}

// Labels that were lost in the making of a data set are one class.
template <typename LabelOf>
void warn_of_one_class(const DataOptions& options, int64_t size, bool train,
                       const LabelOf& label_of) {
  int64_t same = 0;
  while (same < size && label_of(same) == label_of(0)) {
    ++same;
  }
  if (size > 1 && same == size) {
    log_warning(concat("data.path=", options.path, ": all ", size, " samples of the ",
                       train ? "training" : "test", " split that are used have label ", label_of(0),
                       ", so there is nothing to learn; check how the labels were written"));
  }
}

// Decodes the region of a plan. With an exact plan also resizes it, to [size, size, 3].
void decode(const std::vector<uint8_t>& bytes, const DataSource& where, const RegionPlan& plan,
            int64_t channels, uint8_t* out) {
  const CropBox& region = plan.region;
  const size_t num_pixels = static_cast<size_t>(region.width) * static_cast<size_t>(region.height);
  const bool resizes = plan.exact && !plan.same_size;
  thread_local std::vector<uint8_t> pixels;
  if (resizes) {
    pixels.resize(num_pixels * 3);
  }
  uint8_t* decoded = resizes ? pixels.data() : out;
  decode_image_region(bytes, where, plan.denominator, region, decoded);
  if (channels == 1) {
    make_grey(decoded, num_pixels);
  }
  if (!resizes) {
    return;
  }
  resample_bytes({pixels.data(), region.width, region.height, region.x, region.y}, plan.columns,
                 plan.rows, out);
}

}  // namespace

DataError with_fix(const CorruptImage& corrupt, const char* fix) {
  return DataError(concat(corrupt.what(), fix));
}

ImageDataset::ImageDataset(std::unique_ptr<ImageSource> source, const DataOptions& resolved,
                           bool train, bool keep_decoded)
    : source_(std::move(source)), options_(resolved), transform_(resolved, train) {
  size_ = num_used(options_, source_->size(), train);
  num_classes_ = options_.num_classes > 0 ? options_.num_classes : source_->num_classes();
  check_labels();
  warn_of_one_class(options_, size_, train, [&](int64_t i) { return source_->label(i); });
  if (keep_decoded) {
    decode_all();
  } else if (transform_.needs_square()) {
    throw SettingsError(concat("data.augment=pad_crop needs decoded images of one size in memory (",
                               size_, " images of ", options_.image_size,
                               " px); fix: set data.cache=ram, or "
                               "data.augment=random_resized_crop"));
  }
}

ImageDataset::ImageDataset(DecodedImages images, int64_t num_classes, const DataOptions& resolved,
                           bool train)
    : options_(resolved), transform_(resolved, train), decoded_(std::move(images)) {
  size_ = num_used(options_, static_cast<int64_t>(decoded_.labels.size()), train);
  num_classes_ = options_.num_classes > 0 ? options_.num_classes : num_classes;
  if (options_.channels == 1) {
    make_grey(decoded_.pixels.data(), decoded_.pixels.size() / 3);
  }
  for (int64_t i = 0; i < size_; ++i) {
    const int64_t label = decoded_.labels[static_cast<size_t>(i)];
    if (label >= num_classes_) {
      throw DataError(concat("data.path=", options_.path, ": image ", i, " has label ", label,
                             ", which does not fit data.num_classes=", num_classes_,
                             "; fix: leave data.num_classes out"));
    }
  }
  warn_of_one_class(options_, size_, train,
                    [&](int64_t i) { return decoded_.labels[static_cast<size_t>(i)]; });
}

void ImageDataset::check_labels() const {
  // Without a list of classes the largest label gives their number. A damaged label would then make
  // a model of a billion classes.
  constexpr int64_t kCommon = 65536;
  const bool set = options_.num_classes > 0;
  const bool listed = !source_->class_names().empty();
  const int64_t limit = set || listed ? num_classes_ : std::max(kCommon, source_->size());
  const int64_t count = set ? size_ : source_->size();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t label = source_->label(i);
    if (label < limit) {
      continue;
    }
    const std::string where = concat(source_->locate(i).to_string(), ": label ", label);
    if (set) {
      throw DataError(concat(where, " does not fit data.num_classes=", num_classes_));
    }
    if (listed) {
      throw DataError(concat(where, " does not fit the ", limit, " listed classes", kDataFileFix));
    }
    throw DataError(concat(where, " is not below ", limit, ", and no classes.txt lists the classes",
                           kDataFileFix, ", or set data.num_classes"));
  }
}

std::optional<ExampleLayout> ImageDataset::layout() const {
  return ExampleLayout{{options_.channels, options_.image_size, options_.image_size},
                       options_.channels_last};
}

Example written_example(const Dataset& dataset, int64_t index, int64_t epoch) {
  const ExampleLayout layout = *dataset.layout();
  const int64_t channels = layout.shape[0], side = layout.shape[1];
  at::Tensor memory = layout.channels_last ? at::empty({side, side, channels}, at::kFloat)
                                           : at::empty({channels, side, side}, at::kFloat);
  at::Tensor target = at::empty({}, at::kLong);
  dataset.write(index, epoch, memory.mutable_data_ptr<float>(), target.mutable_data_ptr<int64_t>());
  return {layout.channels_last ? memory.permute({2, 0, 1}) : memory, target};
}

void ImageDataset::write(int64_t index, int64_t epoch, float* data, int64_t* target) const {
  if (index < 0 || index >= size_) {
    throw SettingsError(concat("sample ", index, " does not exist: the data set has ", size_));
  }
  if (!decoded_.labels.empty()) {
    const auto at = static_cast<size_t>(index);
    const int side = transform_.image_size();
    const size_t num_bytes = static_cast<size_t>(side) * static_cast<size_t>(side) * 3;
    transform_.apply({decoded_.pixels.data() + at * num_bytes, side, side},
                     static_cast<uint64_t>(epoch), static_cast<uint64_t>(index), data);
    *target = decoded_.labels[at];
    return;
  }
  thread_local std::vector<uint8_t> pixels;
  RegionPlan plan;
  *target = read_region(index, epoch, plan, [&](const RegionPlan& p) {
    const size_t num_bytes =
        static_cast<size_t>(p.region.width) * static_cast<size_t>(p.region.height) * 3;
    if (pixels.size() < num_bytes) {
      pixels.resize(num_bytes);
    }
    return pixels.data();
  });
  const CropBox& region = plan.region;
  transform_.apply({pixels.data(), region.width, region.height, region.x, region.y}, plan, data);
}

int64_t ImageDataset::read_file(int64_t index, const UseFile& use) const {
  thread_local std::vector<uint8_t> bytes;
  const int64_t used = first_good(index, [&](int64_t candidate) {
    source_->read(candidate, bytes);
    const DataSource where = source_->locate(candidate);
    use(bytes, where, read_image_header(bytes, where, options_.max_pixels));
  });
  return source_->label(used);
}

int64_t ImageDataset::read_region(
    int64_t index, int64_t epoch, RegionPlan& plan,
    const std::function<uint8_t*(const RegionPlan&)>& allocate) const {
  return read_file(index, [&](const std::vector<uint8_t>& bytes, const DataSource& where,
                              const ImageHeader& header) {
    plan = transform_.plan(header.width, header.height, static_cast<uint64_t>(epoch),
                           static_cast<uint64_t>(index), header.largest_denominator);
    const RegionPlan decoding = plan;
    if (plan.exact && !plan.same_size) {  // decode() also resizes
      plan = transform_.plan_same_size();
    }
    decode(bytes, where, decoding, options_.channels, allocate(plan));
  });
}

void ImageDataset::decode_all() {
  const auto side = static_cast<size_t>(transform_.image_size());
  const size_t num_bytes = side * side * 3;
  // Evaluation keeps images as shown; training keeps the centre square.
  DataOptions kept = options_;
  kept.eval_decode = EvalDecode::Full;
  if (transform_.is_random()) {
    kept.eval_resize = kept.image_size;
  }
  const ImageTransform square(kept, /*train=*/false);
  decoded_.pixels.resize(static_cast<size_t>(size_) * num_bytes);
  std::vector<int64_t> labels(static_cast<size_t>(size_));
  std::atomic<int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;
  int64_t error_index = size_;
  auto work = [&] {
    for (int64_t i = next++; i < size_; i = next++) {
      try {
        uint8_t* out = decoded_.pixels.data() + static_cast<size_t>(i) * num_bytes;
        labels[static_cast<size_t>(i)] =
            read_file(i, [&](const std::vector<uint8_t>& bytes, const DataSource& where,
                             const ImageHeader& header) {
              decode(bytes, where, square.plan(header.width, header.height, 0, 0),
                     options_.channels, out);
            });
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (i < error_index) {  // the first file's error, independent of timing
          error = std::current_exception();
          error_index = i;
        }
        next = size_;
      }
    }
  };
  std::vector<std::thread> threads;
  const unsigned num_threads = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  for (unsigned i = 1; i < num_threads; ++i) {
    threads.emplace_back(work);
  }
  work();
  for (auto& thread : threads) {
    thread.join();
  }
  if (error) {
    std::rethrow_exception(error);
  }
  decoded_.labels = std::move(labels);
  if (!transform_.is_random()) {
    options_.eval_resize = options_.image_size;
    transform_ = ImageTransform(options_, /*train=*/false);
  }
}

template <typename F>
int64_t ImageDataset::first_good(int64_t index, F&& use) const {
  if (options_.corrupt == CorruptPolicy::Error) {
    try {
      use(index);
    } catch (const CorruptImage& corrupt) {
      throw with_fix(corrupt, source_->corrupt_fix());
    }
    return index;
  }
  for (int64_t i = 0; i < size_; ++i) {
    const int64_t candidate = (index + i) % size_;
    try {
      use(candidate);
      return candidate;
    } catch (const DataError& e) {
      record_corrupt(candidate, e.what());
    }
  }
  throw DataError(concat("data.path=", options_.path, ": none of the ", size_,
                         " images can be decoded", kDataFileFix));
}

void ImageDataset::record_corrupt(int64_t index, const std::string& message) const {
  std::lock_guard lock(mutex_);
  if (!corrupt_.insert(index).second) {
    return;
  }
  const auto allowed =
      static_cast<int64_t>(options_.max_corrupt_fraction * static_cast<double>(size_));
  const auto count = static_cast<int64_t>(corrupt_.size());
  if (count > allowed) {
    throw DataError(concat(
        "data.corrupt=skip: found ", count, " corrupt images, but data.max_corrupt_fraction=",
        options_.max_corrupt_fraction, " of ", size_, " allows ", allowed, "; the last: ", message,
        "; fix: prepare the data again, or raise data.max_corrupt_fraction"));
  }
  log_warning(concat("skipped a corrupt image (", count, " of ", allowed, " allowed): ", message));
}

int64_t ImageDataset::num_skipped() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(corrupt_.size());
}

}  // namespace ddp::detail
