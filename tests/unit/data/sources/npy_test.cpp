// SPDX-License-Identifier: Apache-2.0
// NumPy's files: every dtype and order, and every kind of error. npy_test.py compares with NumPy.
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/data/tensor_dataset.hpp"
#include "support/catch.hpp"
#include "support/same_bits.hpp"
#include "unit/data/data_test_support.hpp"

using Catch::Contains;
using data_test::message_of;
using ddp::load_npy;
using testing::same_bits;
namespace fs = std::filesystem;

namespace {

std::string start_of_npy(std::size_t header_bytes, int major = 1) {
  std::string text = "\x93NUMPY";
  text += {static_cast<char>(major), '\0'};
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) {
    text += static_cast<char>(header_bytes >> 8 * i & 0xff);
  }
  return text;
}

// Without NumPy's padding: the data are aligned only by chance.
std::string npy(const std::string& header, const std::string& data, int major = 1) {
  return start_of_npy(header.size(), major) + header + data;
}

// With NumPy's padding, the data begin at byte 128.
std::string aligned_npy(const std::string& header, const std::string& data) {
  return npy(header + std::string(128 - 10 - header.size(), ' '), data);
}

std::string dictionary(const std::string& descr, const std::string& shape,
                       const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

class Files {
 public:
  std::string write(const std::string& bytes) {
    const auto path = folder_.path() / ("array" + std::to_string(++count_) + ".npy");
    data_test::write_file(path, bytes);
    return path.string();
  }
  at::Tensor load(const std::string& bytes) { return load_npy(write(bytes)); }
  std::string refusal(const std::string& bytes) {
    const std::string path = write(bytes);
    const auto message = message_of<ddp::DataError>([&] { load_npy(path); });
    REQUIRE_THAT(message, Contains(path + " cannot be read as an array: ") && Contains("; fix: "));
    return message;
  }

 private:
  data_test::TempFolder folder_;
  int count_ = 0;
};

const std::string kSix = bytes_of(at::arange(6, at::kFloat));
const at::Tensor kTwoByThree = at::arange(6, at::kFloat).view({2, 3});

}  // namespace

TEST_CASE("arrays of every dtype are read", "[npy]") {
  Files files;
  const std::vector<std::pair<std::string, at::ScalarType>> dtypes{
      {"|b1", at::kBool},         {"|i1", at::kChar},           {"|u1", at::kByte},
      {"<i2", at::kShort},        {"<u2", at::kUInt16},         {"<f2", at::kHalf},
      {"<i4", at::kInt},          {"<u4", at::kUInt32},         {"<f4", at::kFloat},
      {"<i8", at::kLong},         {"<u8", at::kUInt64},         {"<f8", at::kDouble},
      {"<c8", at::kComplexFloat}, {"<c16", at::kComplexDouble}, {"=f4", at::kFloat},
      {">u1", at::kByte}};
  for (const auto& [descr, dtype] : dtypes) {
    INFO(descr);
    const auto expected = at::tensor({0, 1, 1, 0, 1, 0}, at::kLong).to(dtype).view({3, 2});
    const auto loaded = files.load(npy(dictionary(descr, "(3, 2)"), bytes_of(expected)));
    REQUIRE(same_bits(loaded, expected));
    REQUIRE(reinterpret_cast<uintptr_t>(loaded.const_data_ptr()) % loaded.element_size() == 0);
  }
}

TEST_CASE("a header may be written in several ways", "[npy]") {
  Files files;
  const std::vector<std::string> headers{
      dictionary("<f4", "(2, 3)"),
      dictionary("<f4", "(2, 3)") + std::string(40, ' ') + "\n",
      "{\"shape\": (2,3,), \"descr\":\"<f4\",\"fortran_order\" :False}",
      dictionary("<f4", "(2L, 3L)"),
  };
  for (const auto& header : headers) {
    for (const int major : {1, 2, 3}) {
      INFO(header << major);
      REQUIRE(same_bits(files.load(npy(header, kSix, major)), kTwoByThree));
    }
  }
  const auto fortran = files.load(npy(dictionary("<f4", "(3, 2)", "True"), kSix));
  REQUIRE(same_bits(fortran, kTwoByThree.t()));
  REQUIRE(fortran.strides().vec() == std::vector<int64_t>{1, 3});
  REQUIRE(same_bits(files.load(npy(dictionary("<f4", "()"), kSix.substr(4, 4))),
                    at::ones({}, at::kFloat)));
  REQUIRE(same_bits(files.load(npy(dictionary("<f4", "(0, 3)"), "")), at::empty({0, 3})));
  REQUIRE(files.load(npy(dictionary("<f4", "(0, 4611686018427387904)"), "")).sizes() ==
          at::IntArrayRef{0, int64_t{1} << 62});
}

TEST_CASE("a loaded array is a private view of its file", "[npy]") {
  Files files;
  const std::string path = files.write(aligned_npy(dictionary("<f4", "(2, 3)"), kSix));
  at::Tensor view = load_npy(path)[1];
  view.fill_(7);
  REQUIRE(same_bits(view, at::full({3}, 7.0f)));
  REQUIRE(same_bits(load_npy(path), kTwoByThree));
  // A change of the file shows that a tensor has no copy of it.
  const auto shared = load_npy(path);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(128);
    file.write(kSix.data() + 20, 4);
  }
  REQUIRE(shared[0][0].item<float>() == 5);
}

TEST_CASE("an array larger than the memory is mapped, not read", "[npy]") {
  int overcommit = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> overcommit;
  if (overcommit == 2) {
    WARN("skipped: this system reserves memory for every mapping (vm.overcommit_memory=2)");
    return;
  }
  Files files;
  const int64_t rows = int64_t{1} << 30;  // of 4 KiB
  const std::string path = files.write(aligned_npy(dictionary("<f4", "(1073741824, 1024)"), ""));
  std::error_code error;
  const auto start = fs::file_size(path);
  fs::resize_file(path, start + (static_cast<uintmax_t>(rows) << 12), error);
  if (error) {
    WARN("skipped: this file system has no sparse files of 4 TiB: " << error.message());
    return;
  }
  const auto tensor = load_npy(path);
  REQUIRE(tensor.size(0) == rows);
  REQUIRE(tensor[rows - 1].sum().item<float>() == 0);
}

TEST_CASE("files that are no arrays of numbers are refused", "[npy]") {
  Files files;
  const auto of = [&](const std::string& descr) {
    return files.refusal(npy(dictionary(descr, "(2, 3)"), kSix));
  };
  REQUIRE_THAT(of(">f4"), Contains("big-endian ('>f4')") && Contains("array.astype('<f4')"));
  REQUIRE_THAT(of(">c16"), Contains("big-endian ('>c16')"));
  REQUIRE_THAT(of("|O"), Contains("Python objects ('|O')") && Contains("array.astype('<f4')"));
  for (const char* descr : {"<U5", "|S4", "|V2", "<M8[ns]", "<f16", "f4", "4", ""}) {
    REQUIRE_THAT(of(descr), Contains(std::string("its dtype is '") + descr + "'") &&
                                Contains("allowed are bool, int8 to int64"));
  }
  for (const char* descr : {"[('x', '<f4'), ('y', '<f4')]", "('<f4', (2,))"}) {
    const std::string header =
        std::string("{'descr': ") + descr + ", 'fortran_order': False, 'shape': (2, 3), }";
    REQUIRE_THAT(files.refusal(npy(header, kSix)), Contains("named fields"));
  }
  REQUIRE_THAT(
      files.refusal("PK\x03\x04 and so on"),
      Contains("it is a zip archive (such as .npz); fix: write it again with numpy.save()"));
  REQUIRE_THAT(files.refusal("\x93NUMPX and so on"), Contains("does not begin like a .npy file"));
  REQUIRE_THAT(files.refusal(npy(dictionary("|b1", "(4,)"), std::string("\0\1\2\0", 4))),
               Contains("a bool has a byte other than 0 and 1"));
  REQUIRE_THAT(message_of<ddp::DataError>([] { load_npy("/nonexistent/x.npy"); }),
               Contains("cannot open /nonexistent/x.npy: No such file") &&
                   Contains("fix: check the path and its permissions"));
}

TEST_CASE("damaged .npy files are refused", "[npy]") {
  Files files;
  const std::string good = npy(dictionary("<f4", "(2, 3)"), kSix);
  for (std::size_t size = 0; size < good.size(); ++size) {
    files.refusal(good.substr(0, size));  // at every length, no crash and always a message
  }
  REQUIRE_THAT(files.refusal(good.substr(0, good.size() - 1)),
               Contains("its shape [2, 3] of '<f4' has 24 bytes, but 23 follow the header") &&
                   Contains("truncated"));
  REQUIRE_THAT(files.refusal(good + "x"),
               Contains("24 bytes, but 25 follow") && Contains("one array per file"));
  REQUIRE_THAT(files.refusal(start_of_npy(60000) + dictionary("<f4", "(2, 3)") + kSix),
               Contains("its header has 60000 bytes, but the file"));
  REQUIRE_THAT(files.refusal(start_of_npy(0xffffffff, 2) + dictionary("<f4", "(2, 3)") + kSix),
               Contains("its header has 4294967295 bytes, but the file has "));
  const std::string blanks(std::size_t{2} << 20, ' ');
  REQUIRE_THAT(files.refusal(npy(dictionary("<f4", "(2, 3)") + blanks, kSix, 2)),
               Contains("; the limit is 1048576"));
  for (const int major : {0, 4}) {
    REQUIRE_THAT(files.refusal(npy(dictionary("<f4", "(2, 3)"), kSix, major)),
                 Contains(std::string("its format is ") + std::to_string(major) + ".0"));
  }
  std::string many = "(";
  for (int i = 0; i < 65; ++i) {
    many += "1, ";
  }
  for (const std::string& shape :
       {std::string("(-2, -3)"), std::string("(2, 3"), std::string("2, 3"), std::string("(2.0, 3)"),
        std::string("(9223372036854775808,)"), std::string("(2 3)"), many + ")"}) {
    REQUIRE_THAT(files.refusal(npy(dictionary("<f4", shape), kSix)),
                 Contains("its header is damaged at byte "));
  }
  REQUIRE_THAT(files.refusal(npy(dictionary("<f4", "(4611686018427387904, 1)"), "")),
               Contains("2^63 bytes or more"));
  for (const char* shape : {"(4294967296, 4294967296)", "(0, 4294967296, 4294967296)"}) {
    REQUIRE_THAT(files.refusal(npy(dictionary("<f4", shape), "")),
                 Contains("2^63 elements or more, if dimensions of 0 count as 1"));
  }
  for (const char* header :
       {"", "{}", "{'descr': '<f4', 'shape': (2, 3)}", "{'descr': '<f4'", "{'descr': '<f4}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'shape': (2, 3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'more': 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} more"}) {
    REQUIRE_THAT(files.refusal(npy(header, kSix)), Contains("its header is damaged at byte "));
  }
}

// Started by npy_test.py: each array stands beside its bytes in C order.
TEST_CASE("files of NumPy are read", "[.numpy]") {
  const char* folder = std::getenv("DDP_NUMPY_FILES");
  REQUIRE(folder != nullptr);
  int count = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".npy") {
      continue;
    }
    INFO(entry.path());
    const auto loaded = load_npy(entry.path().string());
    std::istringstream shape(
        data_test::read_file(fs::path(entry.path()).replace_extension("shape")));
    const std::vector<int64_t> expected{std::istream_iterator<int64_t>(shape), {}};
    REQUIRE(loaded.sizes().vec() == expected);
    REQUIRE(bytes_of(loaded.contiguous()) ==
            data_test::read_file(fs::path(entry.path()).replace_extension("bytes")));
    ++count;
  }
  REQUIRE(count > 0);
  std::printf("%d files of NumPy\n", count);
}
