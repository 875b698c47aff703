// SPDX-License-Identifier: Apache-2.0
// Archives that are damaged, hostile or of another version are refused, with the place and the fix.
#include <fstream>

#include "ddp/export/exported_module.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;
using testing::TemporaryFolder;

namespace {

class ArchiveFile {
 public:
  explicit ArchiveFile(const ArchiveBuilder& archive) { archive.write(path()); }
  ArchiveFile(const ArchiveBuilder& archive, const std::string& program) {
    archive.write(path(), program);
  }
  std::string path() const { return folder_.path() + "/net.pt2"; }

 private:
  TemporaryFolder folder_;
};

template <typename Error>
std::string refusal(const ArchiveFile& file) {
  return message_of<Error>([&] { ddp::ExportedModule module(file.path()); });
}

std::string data_error(const ArchiveBuilder& archive) {
  return refusal<ddp::DataError>(ArchiveFile(archive));
}

std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("A sound archive runs", "[export]") {
  const ArchiveFile file(linear_relu());
  ddp::ExportedModule module(file.path());
  const auto x = at::tensor({1.0F, 2.0F, 3.0F, -1.0F, -2.0F, -3.0F}).view({2, 3});
  const auto y = module->forward(x).toTensor();
  CHECK(at::equal(y, at::tensor({6.0F, 6.0F, 0.0F, 0.0F}).view({2, 2})));
  y.sum().backward();
  CHECK(at::equal(module->named_parameters()["fc.weight"].grad(),
                  at::tensor({1.0F, 2.0F, 3.0F}).expand({2, 3})));
}

TEST_CASE("A file that is no archive is named", "[export]") {
  const TemporaryFolder folder;
  const auto path = folder.path() + "/text.pt2";
  std::ofstream(path) << "not a zip";
  CHECK_THAT(message_of<ddp::ReadError>([&] { ddp::ExportedModule module(path); }),
             Contains(path) && Contains("no zip archive") && Contains("torch.export.save"));
  CHECK_THAT(
      message_of<ddp::ReadError>([&] { ddp::ExportedModule module(folder.path() + "/none.pt2"); }),
      Contains("none.pt2") && Contains("No such file"));
  CHECK_THAT(message_of<ddp::ReadError>([&] { ddp::ExportedModule module(folder.path()); }),
             Contains("cannot read"));
}

TEST_CASE("Other formats and versions are named", "[export]") {
  auto archive = linear_relu();
  archive.format = "pt3";
  CHECK_THAT(refusal<ddp::ReadError>(ArchiveFile(archive)),
             Contains("not an archive of torch.export"));
  archive = linear_relu();
  archive.version = "1";
  CHECK_THAT(refusal<ddp::ReadError>(ArchiveFile(archive)),
             Contains("version 1") && Contains("reads 0"));
  auto program = linear_relu().program();
  program["schema_version"] = {{"major", 9}, {"minor", 1}};
  CHECK_THAT(refusal<ddp::DataError>(ArchiveFile(linear_relu(), program.dump())),
             Contains("9.1") && Contains("2.11.0") && Contains("8.17 to 8.20") && Contains("fix"));
}

TEST_CASE("A truncated archive is refused", "[export]") {
  const ArchiveFile file(linear_relu());
  const auto bytes = read_bytes(file.path());
  for (const auto size : {bytes.size() / 2, bytes.size() - 1, std::size_t{10}, std::size_t{0}}) {
    std::ofstream(file.path(), std::ios::binary) << bytes.substr(0, size);
    CHECK_THAT(message_of<ddp::ReadError>([&] { ddp::ExportedModule module(file.path()); }),
               Contains(file.path()));
  }
}

TEST_CASE("Weights that do not fit are named", "[export]") {
  auto archive = linear_relu();
  archive.weights.erase("fc.bias");
  CHECK_THAT(data_error(archive), Contains("the weights lack fc.bias"));
  archive = linear_relu();
  archive.records["weight_0"] = at::ones({5});
  CHECK_THAT(data_error(archive), Contains("fc.weight") && Contains("20 bytes, too few"));
  archive = linear_relu();
  archive.records.erase("weight_1");
  CHECK_THAT(data_error(archive), Contains("fc.bias") && Contains("weight_1 is missing"));
  archive = linear_relu();
  archive.weights["fc.bias"]["use_pickle"] = true;
  CHECK_THAT(data_error(archive), Contains("fc.bias") && Contains("unpickles nothing"));
  archive = linear_relu();
  archive.weights["fc.weight"]["tensor_meta"]["sizes"][0] = integer(int64_t{1} << 62);
  CHECK_THAT(data_error(archive), Contains("fc.weight") && Contains("out of range"));
  archive = linear_relu();
  archive.weights["fc.weight"]["tensor_meta"]["strides"][0] = integer(-3);
  CHECK_THAT(data_error(archive),
             Contains("fc.weight") && Contains("-3, not a whole number of at least 0"));
  archive = linear_relu();
  archive.weights["fc.weight"]["tensor_meta"]["dtype"] = 99;
  CHECK_THAT(data_error(archive), Contains("fc.weight") && Contains("unknown number 99"));
  archive = linear_relu();
  archive.weights["fc.weight"]["path_name"] = "../../secret";
  CHECK_THAT(data_error(archive), Contains("fc.weight") && Contains("is missing"));
  archive = linear_relu();
  archive.buffer("mask", at::full({4}, 1, at::kBool));
  archive.records["weight_2"] = at::full({4}, 2, at::kByte);
  CHECK_THAT(data_error(archive), Contains("mask") && Contains("neither 0 nor 1"));
}

TEST_CASE("Tensor names that are no paths are refused", "[export]") {
  for (const std::string& name : std::vector<std::string>{"", ".", "fc..weight", "fc."}) {
    ArchiveBuilder archive;
    archive.parameter(name, at::ones({1})).output(archive.inputs[0]);
    CHECK_THAT(data_error(archive), Contains("a tensor has the name"));
  }
  std::string deep = "w";
  for (int i = 0; i < 200; ++i) {
    deep = "a." + deep;
  }
  ArchiveBuilder archive;
  archive.parameter(deep, at::ones({1})).output(archive.inputs[0]);
  CHECK_THAT(data_error(archive), Contains("a tensor has the name"));
}

TEST_CASE("A program with a fault names its node and the line of Python", "[export]") {
  const auto faulty = [](const std::string& target,
                         const std::vector<std::pair<std::string, Json>>& arguments,
                         const std::vector<Json>& outputs) {
    auto archive = linear_relu();
    archive.node(target, arguments, outputs);
    return data_error(archive);
  };
  const std::string relu = "torch.ops.aten.relu.default";
  CHECK_THAT(faulty("torch.ops.aten.rellu.default", {{"self", tensor("x")}}, {tensor("y")}),
             Contains("node node_2") && Contains("net.py\", line 7") && Contains("aten::rellu") &&
                 Contains("model.libraries"));
  CHECK_THAT(faulty("torch.ops.aten.add.Tenser", {{"self", tensor("x")}}, {tensor("y")}),
             Contains("aten::add.Tenser"));
  CHECK_THAT(faulty(relu, {{"self", tensor("unknown")}}, {tensor("y")}),
             Contains("no earlier node makes the value unknown"));
  CHECK_THAT(faulty(relu, {{"self", tensor("y")}}, {tensor("y")}),
             Contains("no earlier node makes the value y"));
  CHECK_THAT(faulty(relu, {{"self", tensor("x")}}, {tensor("linear")}),
             Contains("linear is made twice"));
  CHECK_THAT(faulty(relu, {}, {tensor("y")}), Contains("lacks the argument self"));
  CHECK_THAT(faulty(relu, {{"self", tensor("x")}, {"other", integer(1)}}, {tensor("y")}),
             Contains("takes 1 of its 2"));
  CHECK_THAT(faulty(relu, {{"self", tensor("x")}}, {tensor("y"), tensor("z")}),
             Contains("names 2 results of 1"));
  CHECK_THAT(faulty(relu, {{"self", {{"as_custom_obj", {{"name", "o"}}}}}}, {tensor("y")}),
             Contains("as_custom_obj"));
  CHECK_THAT(faulty(relu, {{"self", {{"as_int", 1}, {"as_float", 2.0}}}}, {tensor("y")}),
             Contains("not exactly one kind"));
  CHECK_THAT(faulty("torch.ops.aten.from_file.default",
                    {{"filename", {{"as_string", "/etc/passwd"}}}}, {tensor("y")}),
             Contains("does not run this operator"));
  CHECK_THAT(faulty("torch.ops.higher_order.flex_attention", {}, {}),
             Contains("higher-order operator"));
  CHECK_THAT(faulty("os.system", {{"command", {{"as_string", "true"}}}}, {}),
             Contains("does not know this target"));
}

TEST_CASE("A program whose parts do not fit is refused", "[export]") {
  const auto refused = [](const std::string& program) {
    return refusal<ddp::DataError>(ArchiveFile(linear_relu(), program));
  };
  CHECK_THAT(refused("{"), Contains("models/model.json is damaged"));
  CHECK_THAT(refused("[]"), Contains("models/model.json is damaged"));
  CHECK_THAT(refused(std::string(500, '[')), Contains("nested too deeply"));
  auto program = linear_relu().program();
  program["graph_module"]["signature"]["input_specs"].erase(0);
  CHECK_THAT(refused(program.dump()), Contains("signature does not fit"));
  program = linear_relu().program();
  program["graph_module"]["graph"].erase("nodes");
  CHECK_THAT(refused(program.dump()), Contains("nodes"));
  program = linear_relu().program();
  program["graph_module"]["signature"]["input_specs"][2] = {{"token", {{"arg", {{"name", "x"}}}}}};
  CHECK_THAT(refused(program.dump()), Contains("inputs of the kind token"));
  program = linear_relu().program();
  program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] =
      "Symbol('s0'";
  CHECK_THAT(refused(program.dump()), Contains("expression of a size"));
}
