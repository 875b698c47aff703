// SPDX-License-Identifier: Apache-2.0
// Writes archives as torch.export.save() does, from programs of a few nodes.
#pragma once

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"
#include "unit/train/temporary_folder.hpp"

namespace export_test {

using Json = nlohmann::json;

/// The archive's number for a dtype.
inline int dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kLong:
      return 5;
    case at::kDouble:
      return 8;
    case at::kBool:
      return 12;
    case at::kBFloat16:
      return 13;
    default:
      return 7;  // float32
  }
}
inline Json tensor(const std::string& name) {
  return {{"as_tensor", {{"name", name}}}};
}
inline Json integer(int64_t value) {
  return {{"as_int", value}};
}
inline Json number(double value) {
  return {{"as_float", value}};
}
inline Json truth(bool value) {
  return {{"as_bool", value}};
}
inline Json size_name(const std::string& name) {
  return {{"as_sym_int", {{"as_name", name}}}};
}
inline Json symbol(const std::string& name) {
  return {{"as_expr", {{"expr_str", "Symbol('" + name + "', positive=True, integer=True)"}}}};
}
inline Json leaf() {
  return {{"type", nullptr}, {"context", nullptr}, {"children_spec", Json::array()}};
}
inline Json container(const std::string& type, const std::string& context, const Json& children) {
  return {{"type", type}, {"context", context}, {"children_spec", children}};
}

/// A program that takes tensors by position and returns a tuple, or one tensor.
class ArchiveBuilder {
 public:
  ArchiveBuilder& parameter(const std::string& name, const at::Tensor& value) {
    return state("parameter", "p_", name, value, {{"parameter_name", name}});
  }
  ArchiveBuilder& buffer(const std::string& name, const at::Tensor& value) {
    return state("buffer", "b_", name, value, {{"buffer_name", name}, {"persistent", true}});
  }
  ArchiveBuilder& constant(const std::string& name, const at::Tensor& value) {
    inputs.push_back(tensor("c_" + name));
    input_specs.push_back(
        {{"tensor_constant", {{"arg", {{"name", "c_" + name}}}, {"tensor_constant_name", name}}}});
    constant_records["tensor_" + name] = value.contiguous();
    constants[name] = table_row("tensor_" + name, value, /*is_parameter=*/false);
    return *this;
  }
  ArchiveBuilder& input(const std::string& name, const std::vector<Json>& sizes) {
    inputs.push_back(tensor(name));
    values[name] = {{"sizes", sizes}};
    input_specs.push_back({{"user_input", {{"arg", tensor(name)}}}});
    argument_names.push_back(name);
    return *this;
  }
  ArchiveBuilder& node(const std::string& target,
                       const std::vector<std::pair<std::string, Json>>& arguments,
                       const std::vector<Json>& results) {
    Json given = Json::array();
    for (const auto& [name, argument] : arguments) {
      given.push_back({{"name", name}, {"arg", argument}, {"kind", 1}});
    }
    nodes.push_back(
        {{"name", ddp::concat("node_", nodes.size())},
         {"target", target},
         {"inputs", given},
         {"outputs", results},
         {"metadata", {{"stack_trace", "  File \"net.py\", line 7, in forward\n    x"}}}});
    return *this;
  }
  ArchiveBuilder& linear(const std::string& input, const std::string& weight,
                         const std::string& output, const std::string& bias = "") {
    std::vector<std::pair<std::string, Json>> arguments = {{"input", tensor(input)},
                                                           {"weight", tensor(weight)}};
    if (!bias.empty()) {
      arguments.push_back({"bias", tensor(bias)});
    }
    return node("torch.ops.aten.linear.default", arguments, {tensor(output)});
  }
  ArchiveBuilder& relu(const std::string& input, const std::string& output) {
    return node("torch.ops.aten.relu.default", {{"self", tensor(input)}}, {tensor(output)});
  }
  /// The nodes from `first` on are calls of Python's module `path`.
  ArchiveBuilder& module(const std::string& path, std::size_t first = 0) {
    for (; first < nodes.size(); ++first) {
      nodes[first]["metadata"]["nn_module_stack"] =
          "L__self__,,net.Net;L__self__" + path + "," + path + ",torch.nn.Module";
    }
    return *this;
  }
  ArchiveBuilder& output(const Json& argument) {
    outputs.push_back(argument);
    output_specs.push_back({{"user_output", {{"arg", argument}}}});
    return *this;
  }
  /// The program returns the new value of a buffer.
  ArchiveBuilder& new_value(const std::string& value, const std::string& buffer) {
    outputs.push_back(tensor(value));
    output_specs.push_back(
        {{"buffer_mutation", {{"arg", {{"name", value}}}, {"buffer_name", buffer}}}});
    return *this;
  }
  /// Adds a second program to the archive: the one for evaluation. It has the same constants.
  ArchiveBuilder& evaluation(const ArchiveBuilder& other) {
    others["models/eval.json"] = other.program().dump();
    return *this;
  }

  Json program() const {
    const Json graph = {
        {"inputs", inputs}, {"outputs", outputs}, {"nodes", nodes}, {"tensor_values", values}};
    Json in_leaves = Json::array(), out_leaves = Json::array();
    for (std::size_t i = 0; i < argument_names.size(); ++i) {
      in_leaves.push_back(leaf());
    }
    for (const auto& spec : output_specs) {
      if (spec.contains("user_output")) {
        out_leaves.push_back(leaf());
      }
    }
    const auto call = container("builtins.tuple", "null",
                                {container("builtins.tuple", "null", in_leaves),
                                 container("builtins.dict", "[]", Json::array())});
    const auto result =
        out_leaves.size() == 1 ? leaf() : container("builtins.tuple", "null", out_leaves);
    const Json signature = {{"in_spec", Json::array({1, call}).dump()},
                            {"out_spec", Json::array({1, result}).dump()},
                            {"forward_arg_names", argument_names}};
    return {{"graph_module",
             {{"graph", graph},
              {"signature", {{"input_specs", input_specs}, {"output_specs", output_specs}}},
              {"module_call_graph", {{{"fqn", ""}, {"signature", signature}}}}}},
            {"range_constraints", ranges},
            {"schema_version", {{"major", 8}, {"minor", 17}}},
            {"torch_version", "2.11.0"}};
  }

  void write(const std::string& path) const { write(path, program().dump()); }
  void write(const std::string& path, const std::string& program_text) const {
    caffe2::serialize::PyTorchStreamWriter writer(path);
    const auto add = [&](const std::string& name, const std::string& text) {
      writer.writeRecord(name, text.data(), text.size());
    };
    add("archive_format", format);
    add("archive_version", version);
    add("models/model.json", program_text);
    add("data/weights/model_weights_config.json", Json{{"config", weights}}.dump());
    for (const auto* name : {"model", "eval"}) {
      if (others.count("models/eval.json") != 0 || std::string(name) == "model") {
        add(ddp::concat("data/constants/", name, "_constants_config.json"),
            Json{{"config", constants}}.dump());
      }
    }
    for (const auto& [entry, value] : records) {
      writer.writeRecord("data/weights/" + entry, value.const_data_ptr(), value.nbytes());
    }
    for (const auto& [entry, value] : constant_records) {
      writer.writeRecord("data/constants/" + entry, value.const_data_ptr(), value.nbytes());
    }
    for (const auto& [entry, text] : others) {
      add(entry, text);
    }
    writer.writeEndOfFile();
  }

  // Public, so that a test can make one of them wrong.
  Json inputs = Json::array(), outputs = Json::array(), nodes = Json::array();
  Json values = Json::object(), input_specs = Json::array(), output_specs = Json::array();
  Json ranges = Json::object(), weights = Json::object(), argument_names = Json::array();
  Json constants = Json::object();
  std::map<std::string, at::Tensor> records, constant_records;
  std::map<std::string, std::string> others;  // more entries of the archive
  std::string format = "pt2", version = "0";

 private:
  static Json table_row(const std::string& entry, const at::Tensor& value, bool is_parameter) {
    Json sizes = Json::array(), strides = Json::array();
    for (int64_t i = 0; i < value.dim(); ++i) {
      sizes.push_back(integer(value.size(i)));
      strides.push_back(integer(value.stride(i)));
    }
    return {{"path_name", entry},
            {"is_param", is_parameter},
            {"use_pickle", false},
            {"tensor_meta",
             {{"dtype", dtype_code(value.scalar_type())},
              {"sizes", sizes},
              {"strides", strides},
              {"storage_offset", integer(0)},
              {"requires_grad", is_parameter},
              {"layout", 7}}}};
  }

  ArchiveBuilder& state(const std::string& kind, const std::string& prefix, const std::string& name,
                        const at::Tensor& value, Json spec) {
    auto value_name = prefix + name;
    std::replace(value_name.begin(), value_name.end(), '.', '_');
    inputs.push_back(tensor(value_name));
    spec["arg"] = {{"name", value_name}};
    input_specs.push_back({{kind, spec}});
    const auto entry = ddp::concat("weight_", records.size());
    records[entry] = value.contiguous();
    weights[name] = table_row(entry, value, kind == "parameter");
    return *this;
  }
};

/// The graph of a program as an argument of a higher-order operator.
inline Json graph_argument(const ArchiveBuilder& inner) {
  return {{"as_graph", {{"name", "region"}, {"graph", inner.program()["graph_module"]["graph"]}}}};
}

/// A list of values as an argument of a higher-order operator.
inline Json list_of(const std::vector<std::string>& names) {
  Json list = Json::array();
  for (const auto& name : names) {
    list.push_back({{"name", name}});
  }
  return {{"as_tensors", list}};
}

/// The module of an archive that is removed again.
inline ddp::ExportedModule load(const ArchiveBuilder& archive,
                                const ddp::ExportedModuleOptions& options = {}) {
  const testing::TemporaryFolder folder;
  archive.write(folder.file("net.pt2"));
  return ddp::ExportedModule(folder.file("net.pt2"), options);
}

/// x [batch, 3] -> relu(x weight' + bias), with a batch of 2 to 8.
inline ArchiveBuilder linear_relu() {
  ArchiveBuilder archive;
  archive.parameter("fc.weight", at::ones({2, 3})).parameter("fc.bias", at::zeros({2}));
  archive.input("x", {symbol("s0"), integer(3)});
  archive.ranges["s0"] = {{"min_val", 2}, {"max_val", 8}};
  archive.linear("x", "p_fc_weight", "linear", "p_fc_bias").relu("linear", "relu");
  archive.output(tensor("relu"));
  return archive;
}

}  // namespace export_test
