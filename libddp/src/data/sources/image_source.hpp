// SPDX-License-Identifier: Apache-2.0
// Sources of images and labels: one class per file format.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/images/image_file.hpp"
#include "data/sources/left_out.hpp"
#include "ddp/data/dataset.hpp"

namespace ddp::detail {

inline constexpr const char* kCorruptFix =
    "; fix: prepare the file again, or use the next good image instead with data.corrupt=skip";

class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual int64_t size() const = 0;
  virtual int64_t num_classes() const = 0;
  virtual std::vector<std::string> class_names() const { return {}; }  ///< by number, if known
  virtual int64_t label(int64_t index) const = 0;
  /// Path and offset of sample `index`.
  virtual DataSource locate(int64_t index) const = 0;
  /// Reads the bytes of a sample's image file. Callable from any thread.
  virtual void read(int64_t index, std::vector<uint8_t>& bytes) const = 0;
  /// What a user can do about an image that cannot be decoded, for messages.
  virtual const char* corrupt_fix() const { return kCorruptFix; }
};

/// Decoded images of one size, [n, size, size, 3].
struct DecodedImages {
  std::vector<uint8_t> pixels;
  std::vector<int64_t> labels;
  std::vector<std::string> class_names = {};  ///< by number, if known
};

/// The CIFAR-10 binary files of a split. `folder` or its subfolder cifar-10-batches-bin holds
/// data_batch_1..5.bin and test_batch.bin. A record is 1 byte of label and 3072 bytes of pixels,
/// [3, 32, 32] (https://www.cs.toronto.edu/~kriz/cifar.html).
DecodedImages read_cifar10(const std::string& folder, Split split);
/// The folder with the files; empty if there is none.
std::string find_cifar10(const std::string& folder);

/// The same for CIFAR-100: train.bin, test.bin and fine_label_names.txt, there or in
/// cifar-100-binary. A record begins with two labels, coarse and fine; the fine one is the class.
DecodedImages read_cifar100(const std::string& folder, Split split);
std::string find_cifar100(const std::string& folder);

/// MNIST and sets in its format: train-images-idx3-ubyte, train-labels-idx1-ubyte and the same with
/// t10k-, each optionally with .gz, there or in torchvision's subfolders. Grey images of 28 x 28
/// pixels become RGB.
DecodedImages read_mnist(const std::string& folder, Split split);
/// Throws DataError if two of the subfolders hold such files.
std::string find_mnist(const std::string& folder);

/// The part of a data set to scan.
enum class SourcePart {
  Whole,
  Beginning  ///< sample 0 and perhaps more
};
/// Tar shards in WebDataset layout: KEY.jpg (.jpeg, .png, .webp) next to a decimal label in
/// KEY.cls, or CLASS/KEY.jpg with the class names in classes.txt in the shards' folder. Logs which
/// files a whole scan leaves out.
std::unique_ptr<ImageSource> open_tar_source(const std::string& folder, Split split,
                                             SourcePart part = SourcePart::Whole);
/// train*.tar or train/*.tar; of the test split the first of test*.tar, test/*.tar, val*.tar and
/// val/*.tar that exists. Adds files beside them to `left_out`, if given.
std::vector<std::string> find_tar_shards(const std::string& folder, Split split,
                                         LeftOut* left_out = nullptr);

/// Class folders: the sorted folder names of the training split are the classes of both splits.
/// Each folder is listed once; only links among its entries are examined further. Logs which files
/// a whole scan leaves out.
std::unique_ptr<ImageSource> open_folder_source(const std::string& folder, Split split,
                                                SourcePart part = SourcePart::Whole);
/// Single files. The label of a file is its position. Throws DataError for missing ones.
std::unique_ptr<ImageSource> open_file_list(const std::vector<std::string>& paths);

/// folder/train; folder/test or folder/val. Empty if there is none.
std::string find_split_folder(const std::string& folder, Split split);

/// An example of a data set of images that implements layout() and write().
Example written_example(const Dataset& dataset, int64_t index, int64_t epoch);

std::shared_ptr<Dataset> make_synthetic_dataset(const DataOptions& options, Split split);

}  // namespace ddp::detail
