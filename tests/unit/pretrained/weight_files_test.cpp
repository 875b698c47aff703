// SPDX-License-Identifier: Apache-2.0
// Damaged weight files: the error names file and tensor, before anything changes.
#include <filesystem>

#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "support/named_pipe.hpp"
#include "unit/pretrained/pretrained_test_support.hpp"

namespace {

using testing::message_of;
using testing::NamedModule;
using testing::read_file;
using testing::TemporaryFolder;
using testing::with_header;
using testing::write_file;

const ddp::TensorMap& small() {
  static const ddp::TensorMap tensors{{"model.a.weight", torch::ones({2, 3})},
                                      {"model.b.weight", torch::ones({4})}};
  return tensors;
}

// Returns the error for `path`, which must be equal for both routes and leave the module unchanged.
std::string refusal(const std::string& path) {
  std::string message;
  for (const auto route : {models::WeightRoute::Mapped, models::WeightRoute::Shared}) {
    NamedModule module(testing::zeros_like(small()));
    const auto text = message_of<ddp::ReadError>(
        [&] { models::load_pretrained(module, path, nullptr, {.route = route}); });
    CHECK((message.empty() || message == text));
    message = text;
    for (const auto& parameter : module.parameters()) {
      CHECK(parameter.sum().item<float>() == 0);
    }
  }
  return message;
}

}  // namespace

TEST_CASE("files of a model that hold something else are named for what they are") {
  TemporaryFolder folder;
  for (const auto& [bytes, kind] :
       {std::pair{"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
                  "it is a Git LFS pointer (git lfs pull fetches the file)"},
        std::pair{"<html><body>Sign in</body></html>", "it is an HTML page"},
        std::pair{"Entry not found", "it is text"}}) {
    write_file(folder.file("model.safetensors"), bytes);
    write_file(folder.file("config.json"), bytes);
    CHECK_THAT(refusal(folder.path()),
               Catch::Contains("model.safetensors") && Catch::Contains(kind));
    CHECK_THAT(message_of<ddp::ReadError>([&] { models::read_hf_config(folder.path()); }),
               Catch::Contains("config.json is not JSON") && Catch::Contains(kind));
  }
  write_file(folder.file("pytorch_model.bin"), "\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.");
  CHECK_THAT(refusal(folder.file("pytorch_model.bin")), Catch::Contains("it is a pickle"));
}

TEST_CASE("damaged safetensors files are refused by name") {
  TemporaryFolder folder;
  const auto path = folder.file("model.safetensors");
  CHECK_THAT(refusal(folder.path()), Catch::Contains("holds neither model.safetensors nor"));
  CHECK_THAT(refusal(path), Catch::Contains("cannot read " + path));
  write_file(folder.file("pytorch_model.bin"), "x");
  CHECK_THAT(refusal(folder.path()), Catch::Contains("save its pytorch_model.bin again"));

  ddp::save_safetensors(path, small());
  const std::string whole = read_file(path);
  write_file(path, whole.substr(0, whole.size() - 1));
  CHECK_THAT(refusal(folder.path()), Catch::Contains(path) && Catch::Contains("truncated"));
  write_file(path, whole.substr(0, 20));
  CHECK_THAT(refusal(folder.path()), Catch::Contains("truncated"));
  write_file(path, whole.substr(0, 5));
  CHECK_THAT(refusal(folder.path()), Catch::Contains("only 5 bytes"));
  write_file(path, whole + "x");
  CHECK_THAT(refusal(folder.path()), Catch::Contains("trailing"));
  write_file(path, std::string("\xff\xff\xff\xff\0\0\0\0", 8) + whole);
  CHECK_THAT(refusal(folder.path()), Catch::Contains("header claims 4294967295 bytes, the limit"));
  write_file(path,
             with_header(R"({"model.a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                         R"("model.b.weight":{"dtype":"F32","shape":[4],"data_offsets":[20,36]}})",
                         std::string(36, 'x')));
  CHECK_THAT(refusal(folder.path()), Catch::Contains("'model.b.weight' lies at bytes 20..36"));
}

TEST_CASE("a named pipe is no file of weights") {
  TemporaryFolder folder;
  const testing::NamedPipe pipe(folder.file("model.safetensors"));
  CHECK_THAT(refusal(pipe.path()), Catch::Contains(pipe.path() + ": it is not a regular file"));
  CHECK_FALSE(pipe.was_waited_for());
}

TEST_CASE("what LibTorch throws while weights are read is an error of reading") {
  struct Overlapping : torch::nn::Module {  // no tensor can be written to it
    Overlapping() {
      register_parameter("weight", torch::zeros({1}).expand({4}), /*requires_grad=*/false);
    }
  };
  TemporaryFolder folder;
  const auto path = folder.file("model.safetensors");
  ddp::save_safetensors(path, {{"weight", torch::ones({4})}});
  Overlapping module;
  const auto message =
      message_of<ddp::ReadError>([&] { models::load_pretrained(module, path, nullptr); });
  CHECK_THAT(message, Catch::Contains("the weights in " + path + " could not be loaded: ") &&
                          Catch::Contains("single memory location"));
  CHECK(message.find("frame #") == std::string::npos);
}

TEST_CASE("weights of other dtypes are refused by name") {
  TemporaryFolder folder;
  const auto path = folder.file("model.safetensors");
  for (const auto& [dtype, word] : {std::pair{at::kLong, "I64"},
                                    {at::kByte, "U8"},
                                    {at::kFloat8_e4m3fn, "F8_E4M3"},
                                    {at::kDouble, "F64"}}) {
    auto tensors = small();
    tensors["model.b.weight"] = tensors["model.b.weight"].to(dtype);
    ddp::save_safetensors(path, tensors);
    CHECK_THAT(refusal(path), Catch::Contains(path + ": the tensor 'model.b.weight'") &&
                                  Catch::Contains(std::string("dtype ") + word));
  }
  auto gptq = small();  // packed integers under their own names
  gptq.erase("model.b.weight");
  gptq["model.b.qweight"] = torch::ones({2}).to(at::kInt);
  gptq["model.b.scales"] = torch::ones({2});
  ddp::save_safetensors(path, gptq);
  CHECK_THAT(refusal(path), Catch::Contains("'model.b.qweight'") && Catch::Contains("quantized"));
}

TEST_CASE("an index that its shards contradict is refused") {
  TemporaryFolder folder;
  const auto index = folder.file("model.safetensors.index.json");
  ddp::save_safetensors(folder.file("one.safetensors"),
                        {{"model.a.weight", small().at("model.a.weight")}});
  const auto use = [&](const std::string& weight_map) {
    write_file(index, "{\"metadata\": {}, \"weight_map\": " + weight_map + "}");
    return refusal(folder.path());
  };
  const std::string both =
      R"({"model.a.weight": "one.safetensors", "model.b.weight": "two.safetensors"})";
  CHECK_THAT(use(both), Catch::Contains("the shard " + folder.file("two.safetensors") +
                                        " is missing: " + index));
  ddp::save_safetensors(folder.file("two.safetensors"), {{"model.c.weight", torch::ones({4})}});
  CHECK_THAT(use(both),
             Catch::Contains(index + " says that two.safetensors holds 'model.b.weight'"));
  CHECK_THAT(use(R"({"model.a.weight": "../one.safetensors"})"),
             Catch::Contains("\"weight_map.model.a.weight\"") &&
                 Catch::Contains("a file in the same folder"));
  CHECK_THAT(use(R"({"model.a.weight": 1})"), Catch::Contains("expected a string"));
  CHECK_THAT(use("[]"), Catch::Contains("\"weight_map\" is [], expected an object"));
  write_file(index, "{}");
  CHECK_THAT(refusal(index), Catch::Contains("\"weight_map\" is missing"));
  write_file(index, "{");
  CHECK_THAT(refusal(index), Catch::Contains("is not JSON"));

  // A shard with a part of the weights, and the valid case.
  ddp::save_safetensors(folder.file("two.safetensors"), {{"model.b.weight", torch::ones({4}) * 3}});
  write_file(index, "{\"weight_map\": " + both + "}");
  NamedModule module(testing::zeros_like(small()));
  models::load_pretrained(module, folder.path());
  CHECK(ddp::named_weights(module).at("model.b.weight").sum().item<float>() == 12);
  const auto shard = read_file(folder.file("two.safetensors"));
  write_file(folder.file("two.safetensors"), shard.substr(0, shard.size() - 4));
  CHECK_THAT(refusal(index),
             Catch::Contains(folder.file("two.safetensors")) && Catch::Contains("truncated"));
}
