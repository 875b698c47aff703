// SPDX-License-Identifier: Apache-2.0
// Conditions on sizes: each is true or false as in Python, and a call that breaks one is refused.
#include "export/guards.hpp"

#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"

using namespace export_test;
using Catch::Contains;
using ddp::detail::ExportedProgram;
using ddp::detail::Guards;
using ddp::detail::InputKind;
using ddp::detail::TreeSpec;
using testing::message_of;

namespace {

TreeSpec tree(TreeSpec::Kind kind, std::vector<TreeSpec> children,
              std::vector<std::string> keys = {}) {
  return {kind, std::move(keys), std::move(children)};
}

// forward(x, pair, n, *, tensors): a parameter first, then a tensor, a pair of tensors, a number
// and a dict of one tensor.
ExportedProgram program(const std::string& guard) {
  using Kind = TreeSpec::Kind;
  ExportedProgram result;
  result.inputs = {{InputKind::Parameter, "weight", true, {}}};
  for (int i = 0; i < 5; ++i) {
    result.inputs.push_back({InputKind::User, "", true, {}});
  }
  const auto pair = tree(Kind::Tuple, {TreeSpec(), TreeSpec()});
  result.in_spec = tree(
      Kind::Tuple, {tree(Kind::Tuple, {TreeSpec(), pair, TreeSpec()}),
                    tree(Kind::Dict, {tree(Kind::Dict, {TreeSpec()}, {"mask"})}, {"tensors"})});
  result.argument_names = {"x", "pair", "n"};
  result.guards = {guard};
  return result;
}

const std::vector<c10::IValue>& inputs() {
  static const std::vector<c10::IValue> values = {at::ones({99}),          at::ones({6, 7}),
                                                  at::ones({3}),           at::ones({4}),
                                                  c10::IValue(int64_t{5}), at::ones({8, 9}).t()};
  return values;
}

// "", or the message.
std::string refusal(const std::string& guard) {
  const Guards guards(program(guard));
  REQUIRE(guards.unreadable().empty());
  return message_of<ddp::SettingsError>([&] { guards.check(inputs()); });
}

bool holds(const std::string& guard) {
  return refusal(guard).empty();
}

}  // namespace

TEST_CASE("Conditions on sizes have Python's precedence and values", "[export]") {
  for (const auto* guard : {"L['x'].size()[0] == 6",
                            "L['x'].shape[1] == 7",
                            "L['pair'][0].size()[0] == 3",
                            "L['pair'][1].size()[0] == 4",
                            "L['n'] == 5",
                            "L['tensors']['mask'].size()[0] == 9",
                            "L['tensors'].mask.size()[1] == 8",
                            "L['tensors']['mask'].stride()[0] == 1",
                            "L['x'].storage_offset() == 0",
                            "2 + 3*4 == 14",
                            "(2 + 3)*4 == 20",
                            "-7 // 2 == -4",
                            "-7 % 3 == 2",
                            "7 - 2 - 1 == 4",
                            "2**3**2 == 512",
                            "-2**2 == -4",
                            "8 // 2 // 2 == 2",
                            "7 / 2 == 3.5",
                            "1 < 2 < 3",
                            "not 1 > 2",
                            "not not 1 < 2",
                            "1 > 2 or 2 > 1 and 3 > 2",
                            "True and not False",
                            "max(1, L['n']) == 5",
                            "max(1, 9, L['n']) == 9",
                            "min(1, 2) == 1",
                            "math.trunc(7 / 2) == 3",
                            "float(L['n']) == 5.0",
                            "int(7 / 2) == 3",
                            "torch.sym_max(1, 2) == 2",
                            "(((-2) + L['x'].size()[0]) % 2) == 0",
                            "L['n']",
                            "1 == 1 or 1 // 0 == 1",
                            "torch.sym_not(1 > 2)",
                            "2 * -3 == -6"}) {
    INFO(guard);
    CHECK(holds(guard));
  }
  for (const auto* guard :
       {"L['x'].size()[0] != 6", "1 < 2 < 2", "3 > 2 > 2", "not 2 > 1", "False or 1 > 2",
        "2 > 1 and 1 > 2", "L['n'] - 5", "1 == 2", "(1 > 2 or 2 > 1) and 3 < 2"}) {
    INFO(guard);
    CHECK_FALSE(holds(guard));
  }
}

TEST_CASE("A refused call names the condition and the sizes in it", "[export]") {
  const auto message = refusal("L['x'].size()[0] % 4 == L['n'] - 5");
  CHECK_THAT(message, Contains("the export holds only while L['x'].size()[0] % 4 == L['n'] - 5"));
  CHECK_THAT(message, Contains("L['n'] is 5, L['x'].size()[0] is 6"));
  CHECK_THAT(refusal("1 // (L['n'] - 5) == 1"), Contains("divides by zero"));
  CHECK_THAT(refusal("L['n'].size()[0] == 1"), Contains("L['n'].size()[0] is unknown"));
  CHECK_THAT(refusal("L['x'].size()[2] == 1"), Contains("2 dimensions"));
  CHECK_THAT(refusal("L['x'] == 1"), Contains("no number"));
}

TEST_CASE("Conditions that cannot be read are listed and do not end a load", "[export]") {
  for (const auto* guard :
       {"", "L['y'].size()[0] == 1", "L['x'].size()[0] == ", "sin(1) == 1", "(1 == 1", "1 == 1)",
        "L['x'].size()[99999999999999999999] == 1", "L['x is 1", "1 @ 2", "'a' == 'a'", "L",
        "L['x'].size()[]", "12a == 1"}) {
    INFO(guard);
    CHECK(Guards(program(guard)).unreadable().size() == 1);
  }
  CHECK(Guards(program(std::string(100000, '('))).unreadable().size() == 1);
  CHECK(Guards(program(std::string(100000, '-') + "1")).unreadable().size() == 1);
  for (const std::string link : {"+1", " and 1", " or 0", " < 1", "*1"}) {
    INFO(link);
    std::string chain = "1", long_chain = "1";
    for (int i = 0; i < 100000; ++i) {
      chain += i < 100 ? link : "";
      long_chain += link;
    }
    CHECK(Guards(program(chain)).unreadable().empty());
    CHECK(Guards(program(long_chain)).unreadable().size() == 1);
  }
}

TEST_CASE("A module checks the conditions of its archive at each call", "[export]") {
  auto archive = linear_relu();
  auto json = archive.program();
  json["guards_code"] = {"(L['x'].size()[0] % 2) == 0"};
  const testing::TemporaryFolder folder;
  archive.write(folder.file("net.pt2"), json.dump());
  ddp::ExportedModule module(folder.file("net.pt2"));
  CHECK(module->forward(at::ones({4, 3})).toTensor().size(0) == 4);
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               module->forward(at::ones({3, 3}));
             }),
             Contains("L['x'].size()[0] is 3"));
  module->train();
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               module->forward(at::ones({5, 3}));
             }),
             Contains("L['x'].size()[0] is 5"));
}
