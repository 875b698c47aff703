// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <filesystem>

#include "ddp/core/error.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/train/weights.hpp"
#include "support/catch.hpp"
#include "support/file_rights.hpp"
#include "support/same_bits.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using ddp::TensorMap;
using testing::same_bits;
using testing::TemporaryFolder;

TensorMap all_dtypes() {
  torch::manual_seed(3);
  TensorMap tensors;
  const auto values = torch::randn({3, 5}) * 10;
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kUInt16, at::kInt, at::kUInt32,
                           at::kLong, at::kUInt64, at::kHalf, at::kBFloat16, at::kFloat,
                           at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexFloat}) {
    tensors[std::string("t.") + at::toString(dtype)] = values.abs().to(dtype);
  }
  tensors["t.bool"] = values > 0;
  tensors["scalar"] = torch::tensor(2.5);
  tensors["empty"] = torch::empty({0, 4});
  tensors["nan"] = torch::full({2}, NAN);
  return tensors;
}

std::string with_header(const std::string& json, const std::string& data) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(json.size() >> 8 * i & 0xff);
  }
  return bytes + json + data;
}

std::string refusal(const std::string& path) {
  try {
    ddp::load_safetensors(path);
  } catch (const ddp::ReadError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("safetensors keep every dtype bit for bit") {
  TemporaryFolder folder;
  const auto path = folder.file("a.safetensors");
  const auto tensors = all_dtypes();
  ddp::save_safetensors(path, tensors, {{"note", "ünïcode \"quoted\""}});
  const auto loaded = ddp::load_safetensors(path);
  REQUIRE(loaded.tensors.size() == tensors.size());
  for (const auto& [name, tensor] : tensors) {
    INFO(name);
    REQUIRE(same_bits(loaded.tensors.at(name), tensor));
  }
  REQUIRE(loaded.metadata.at("note") == "ünïcode \"quoted\"");
}

TEST_CASE("safetensors files have the rights that the umask leaves") {
  TemporaryFolder folder;
  for (const auto& [mask, rights] : {std::pair{022, 0644}, {077, 0600}, {002, 0664}}) {
    const testing::Umask umask(mask);
    ddp::save_safetensors(folder.file("a.safetensors"), {{"w", torch::zeros(2)}});
    REQUIRE(testing::rights_of(folder.file("a.safetensors")) == rights);
  }
}

TEST_CASE(
    "safetensors files hold strided tensors in logical order, and loaded tensors are writable") {
  TemporaryFolder folder;
  const auto path = folder.file("a.safetensors");
  const auto nhwc = torch::arange(24, torch::kFloat)
                        .reshape({1, 2, 3, 4})
                        .contiguous(at::MemoryFormat::ChannelsLast);
  ddp::save_safetensors(path, {{"w", nhwc}, {"t", torch::arange(6).reshape({2, 3}).t()}});
  auto loaded = ddp::load_safetensors(path).tensors;
  REQUIRE(loaded.at("w").is_contiguous());
  REQUIRE(loaded.at("w").equal(nhwc));
  REQUIRE(loaded.at("t").equal(torch::arange(6).reshape({2, 3}).t()));
  loaded.at("w").zero_();
  REQUIRE(ddp::load_safetensors(path).tensors.at("w").equal(nhwc));
}

TEST_CASE("safetensors files hold empty tensors with dimensions as large as PyTorch allows") {
  TemporaryFolder folder;
  const auto path = folder.file("a.safetensors");
  const auto empty = torch::empty({0, int64_t{1} << 62});
  ddp::save_safetensors(path, {{"w", empty}});
  REQUIRE(ddp::load_safetensors(path).tensors.at("w").sizes() == empty.sizes());
}

TEST_CASE("false safetensors headers are refused") {
  TemporaryFolder folder;
  const auto path = folder.file("bad.safetensors");
  const auto [json, data, reason] = GENERATE(table<std::string, std::string, std::string>({
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", std::string(9, 'x'),
       "trailing"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", std::string(7, 'x'),
       "truncated"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", std::string(8, 'x'),
       "number of bytes"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", "",
       "shape [4611686018427387904,4] has 2^63 elements or more"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", "",
       "shape [4611686018427387904] has 2^63 bytes or more"},
      {R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", std::string(8, 'x'),
       "unknown dtype"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       std::string(6, 'x'), "expected to start at 4"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", std::string(4, 'x'),
       "expected to start at 0"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       std::string(2, 'x'), "twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x", "twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", "x", "a number"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "x", "an entry without"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "x", "negative"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", "x", "fraction"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", "x", "a list"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{}}})", "x", "unknown key"},
      {R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})", "\x02", "other than 0 and 1"},
      {R"({"__metadata__":{"a":1}})", "", "a number"},
      {R"({"a":)", "", "broken JSON"},
      {R"({"a":{"dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],)"
       R"("data_offsets":[0,0]}})",
       "", "2^63 elements or more, if dimensions of 0 count as 1"},
      {std::string("{}\0 {hidden", 12), "", "a zero byte"},
      {std::string("{}\0", 3), "", "a zero byte"},
      {R"([])", "", "does not start with"},
      {" ", "", "does not start with"},
      {"", "", "a file of zero bytes"},
  }));
  INFO(json);
  testing::write_file(path, with_header(json, data));
  REQUIRE_THAT(refusal(path), Catch::Contains(reason) && Catch::Contains(path));
}

TEST_CASE("tensors that a safetensors file cannot hold are refused with the file's name") {
  TemporaryFolder folder;
  const auto path = folder.file("a.safetensors");
  const auto refused = [&](const TensorMap& tensors, const std::map<std::string, std::string>& m) {
    try {
      ddp::save_safetensors(path, tensors, m);
    } catch (const ddp::WriteError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto w = torch::zeros(2);
  const int64_t huge = int64_t{1} << 62;
  const auto overflowing = torch::empty({0}).as_strided({0, huge, huge}, {0, 0, 0});
  CHECK_THAT(refused({{"w\xff\n", w}}, {}),
             Catch::StartsWith("cannot write " + path + ": the tensor's name \"w\\ufffd\\n\"") &&
                 Catch::Contains("not UTF-8"));
  CHECK_THAT(refused({{"w", w}}, {{"k", "\xc3"}}), Catch::Contains("the metadata is not UTF-8"));
  CHECK_THAT(refused({{"__metadata__", w}}, {}), Catch::Contains("named \"__metadata__\""));
  CHECK_THAT(refused({{"w", overflowing}}, {}),
             Catch::Contains("named \"w\" of F32 [0,4611686018427387904,4611686018427387904]"));
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("safetensors lengths are checked before memory is allocated") {
  TemporaryFolder folder;
  const auto path = folder.file("bad.safetensors");
  testing::write_file(path, "");
  REQUIRE_THAT(refusal(path), Catch::Contains("an empty file"));
  testing::write_file(path, std::string(8, '\xff') + "{}");
  REQUIRE_THAT(refusal(path), Catch::Contains("the limit is 16777216"));
  testing::write_file(path, std::string("\x10\0\0\0\0\0\0\0{}", 10));
  REQUIRE_THAT(refusal(path), Catch::Contains("truncated"));
  REQUIRE_THAT(refusal(folder.file("none")), Catch::Contains("No such file"));
  REQUIRE_THAT(refusal(folder.path()), Catch::Contains("cannot read"));
}

TEST_CASE("a safetensors file with a flipped header byte is refused or read completely") {
  // A flipped bit inside a name or digit can give another valid header. It must never give a tensor
  // with bytes outside the file, which the address sanitizer detects.
  TemporaryFolder folder;
  const auto path = folder.file("a.safetensors");
  ddp::save_safetensors(path,
                        {{"weight", torch::ones({4, 2})}, {"flag", torch::ones({3}, at::kBool)}});
  const std::string good = testing::read_file(path);
  int refused = 0, tried = 0;
  for (std::size_t i = 0; i + 35 < good.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit, ++tried) {
      auto bad = good;
      bad[i] = static_cast<char>(bad[i] ^ 1 << bit);
      testing::write_file(path, bad);
      try {
        for (const auto& [name, tensor] : ddp::load_safetensors(path).tensors) {
          REQUIRE(tensor.nbytes() <= good.size());
          (void)tensor.to(at::kDouble).sum();
        }
      } catch (const ddp::ReadError&) {
        ++refused;
      }
    }
  }
  REQUIRE(refused > tried / 2);
  for (std::size_t size = 0; size < good.size(); ++size) {
    testing::write_file(path, good.substr(0, size));
    REQUIRE(refusal(path) != "");
  }
}

TEST_CASE("weights are loaded by name; differences are listed") {
  TemporaryFolder folder;
  const auto path = folder.file("w.safetensors");
  torch::nn::Sequential a(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4),
                          torch::nn::Linear(4, 2));
  torch::nn::Sequential b(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4),
                          torch::nn::Linear(4, 2));
  ddp::save_weights(*a, path);
  REQUIRE(ddp::load_weights(*b, path).empty());
  for (const auto& [name, tensor] : ddp::named_weights(*a)) {
    REQUIRE(ddp::named_weights(*b).at(name).equal(tensor));
  }

  torch::nn::Sequential c(torch::nn::Conv2d(3, 4, 3), torch::nn::Linear(4, 2));
  const auto before = ddp::named_weights(*c).at("0.weight").clone();
  std::string message;
  try {
    ddp::load_weights(*c, path);
  } catch (const ddp::MismatchError& error) {
    message = error.what();
  }
  REQUIRE_THAT(message, Catch::Contains("unexpected: 1.num_batches_tracked") &&
                            Catch::Contains("1.weight: [2, 4] in the module, [4] in the file"));
  REQUIRE(ddp::named_weights(*c).at("0.weight").equal(before));

  torch::nn::Sequential d(torch::nn::Conv2d(3, 4, 3));
  REQUIRE_THROWS_AS(ddp::load_weights(*d, path), ddp::MismatchError);
  REQUIRE(ddp::load_weights(*d, path, false).unexpected.size() == 7);
  REQUIRE(ddp::named_weights(*d).at("0.weight").equal(ddp::named_weights(*a).at("0.weight")));
}

TEST_CASE("of a file with several models, weights are loaded by prefix") {
  TemporaryFolder folder;
  const auto path = folder.file("gan.safetensors");
  torch::nn::Linear first(3, 2), second(3, 2), loaded(3, 2);
  ddp::TensorMap both;
  for (const auto& [name, tensor] : ddp::named_weights(*first)) {
    both["g." + name] = tensor;
    both["g2." + name] = ddp::named_weights(*second).at(name);
  }
  ddp::save_safetensors(path, both);
  REQUIRE(ddp::load_weights(*loaded, path, "g").empty());
  REQUIRE(loaded->weight.equal(first->weight));
  REQUIRE(ddp::load_weights(*loaded, path, "g2").empty());
  REQUIRE(loaded->weight.equal(second->weight));
  REQUIRE(ddp::load_weights(*loaded, path, std::string("g")).empty());
  REQUIRE(loaded->weight.equal(first->weight));
  const bool strict = GENERATE(true, false);
  const std::string mistyped = "d";
  REQUIRE_THROWS_WITH(ddp::load_weights(*loaded, path, mistyped, strict),
                      Catch::Contains("the prefix 'd'; prefixes of the file: g, g2"));
}
