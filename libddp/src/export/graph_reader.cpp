// SPDX-License-Identifier: Apache-2.0
#include <c10/core/Device.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/control/wire/bounded_json.hpp"
#include "core/log/error_text.hpp"
#include "ddp/core/error.hpp"
#include "export/graph.hpp"
#include "export/json_access.hpp"

namespace ddp::detail {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxNodes = 1'000'000;
// Schema versions of LibTorch 2.11 to 2.15. 18 to 20 add the dtypes uint32, uint64 and
// float8_e8m0fnu, and lists of lists of floats.
constexpr int64_t kSchemaMajor = 8, kOldestMinor = 17, kNewestMinor = 20;

// Python's .to(dtype) records the dtype that its input had, which autocast changes.
constexpr const char* kMetadataCheck = "torch.ops.aten._assert_tensor_metadata.default";

Argument read_argument(const Json& json);

// A union has one entry: its kind and its value.
std::pair<std::string, const Json&> only_entry(const Json& json) {
  if (!json.is_object() || json.size() != 1) {
    throw DataError("a value has not exactly one kind");
  }
  return {json.begin().key(), json.begin().value()};
}

template <typename Read>
Argument read_list(const Json& list, const Read& read) {
  Argument::List arguments;
  for (const auto& item : list) {
    arguments.push_back(read(item));
  }
  return {std::move(arguments)};
}

Argument constant(c10::IValue value) {
  return {std::move(value)};
}
Argument named(const Json& name) {
  return {ValueName{name.get<std::string>()}};
}
Argument tensor(const Json& json) {
  return named(json.at("name"));
}

Argument integer(const Json& json) {
  return constant(whole_number(json, std::numeric_limits<int64_t>::min(), "an integer"));
}

Argument number(const Json& json) {
  if (json.is_number()) {
    return constant(json.get<double>());
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto& word = json.get_ref<const std::string&>();
  if (word != "NaN" && word != "Infinity" && word != "-Infinity") {
    throw DataError("a number is '" + printable(word.substr(0, 40)) + "'");
  }
  return constant(word == "NaN"        ? std::numeric_limits<double>::quiet_NaN()
                  : word == "Infinity" ? kInfinity
                                       : -kInfinity);
}

Argument truth(const Json& json) {
  return constant(json.get<bool>());
}
Argument text(const Json& json) {
  return constant(json.get<std::string>());
}

// {"as_name": …} or a constant of its kind.
Argument symbol(const Json& json) {
  if (json.contains("as_name")) {
    return named(json.at("as_name"));
  }
  if (json.contains("as_int")) {
    return integer(json.at("as_int"));
  }
  return json.contains("as_bool") ? truth(json.at("as_bool")) : number(json.at("as_float"));
}

Argument optional_tensor(const Json& json) {
  return json.contains("as_tensor") ? tensor(json.at("as_tensor")) : constant({});
}

Argument device(const Json& json) {
  const auto type = json.at("type").get<std::string>();
  try {
    return constant(c10::Device(type));
  } catch (const c10::Error&) {
    throw DataError("the device '" + printable(type.substr(0, 40)) + "' is unknown");
  }
}

Argument complex_number(const Json& json) {
  return constant(c10::complex<double>(number(json.at("real")).constant()->toDouble(),
                                       number(json.at("imag")).constant()->toDouble()));
}

Graph read_graph(const Json& json);

Argument subgraph(const Json& json) {
  return {std::make_shared<const Graph>(read_graph(json.at("graph")))};
}

template <auto Read>
Argument list_of(const Json& json) {
  return read_list(json, Read);
}

Argument read_argument(const Json& json) {
  static const std::map<std::string, Argument (*)(const Json&)> kReaders = {
      {"as_none", [](const Json&) { return constant({}); }},
      {"as_tensor", tensor},
      {"as_tensors", list_of<tensor>},
      {"as_optional_tensor", optional_tensor},
      {"as_optional_tensors", list_of<optional_tensor>},
      {"as_nested_tensors", list_of<list_of<tensor>>},
      {"as_int", integer},
      {"as_ints", list_of<integer>},
      {"as_int_lists", list_of<list_of<integer>>},
      {"as_float", number},
      {"as_floats", list_of<number>},
      {"as_float_lists", list_of<list_of<number>>},
      {"as_bool", truth},
      {"as_bools", list_of<truth>},
      {"as_string", text},
      {"as_strings", list_of<text>},
      {"as_complex", complex_number},
      {"as_sym_int", symbol},
      {"as_sym_ints", list_of<symbol>},
      {"as_sym_float", symbol},
      {"as_sym_floats", list_of<symbol>},
      {"as_sym_bool", symbol},
      {"as_sym_bools", list_of<symbol>},
      {"as_scalar_type", [](const Json& value) { return Argument{scalar_type(value)}; }},
      {"as_layout", [](const Json& value) { return constant(layout(value)); }},
      {"as_memory_format", [](const Json& value) { return constant(memory_format(value)); }},
      {"as_device", device},
      {"as_graph", subgraph},
  };
  const auto [kind, value] = only_entry(json);
  const auto reader = kReaders.find(kind);
  if (reader == kReaders.end()) {
    throw DataError("libddp does not support arguments of the kind " +
                    printable(kind.substr(0, 40)));
  }
  return reader->second(value);
}

// The innermost line of Python that the export recorded: "File "net.py", line 7, in forward".
std::string last_python_line(const std::string& trace) {
  const auto start = trace.rfind("File \"");
  return start == std::string::npos
             ? ""
             : printable(trace.substr(start,
                                      std::min<std::size_t>(trace.find('\n', start) - start, 300)));
}

// The last of "key,path,type;key,path,type".
std::string innermost_module(const std::string& stack) {
  const auto entry = stack.substr(stack.rfind(';') + 1);  // npos + 1 is 0
  const auto start = entry.find(',');
  const auto end = entry.find(',', start + 1);
  if (start == std::string::npos || end == std::string::npos) {
    return "";
  }
  const auto path = entry.substr(start + 1, end - start - 1);
  return path.starts_with("_empty_nn_module_stack") ? "" : path;  // a node of no module
}

Node read_node(const Json& json) {
  Node node;
  node.target = json.at("target").get<std::string>();
  const auto name = json.find("name");
  node.name = name != json.end() && name->is_string() ? name->get<std::string>() : "";
  const auto& metadata = json.at("metadata");
  node.python_line = last_python_line(metadata.value("stack_trace", ""));
  node.module = innermost_module(metadata.value("nn_module_stack", ""));
  try {
    for (const auto& input : json.at("inputs")) {
      node.inputs.push_back({input.at("name").get<std::string>(), read_argument(input.at("arg"))});
    }
    for (const auto& output : json.at("outputs")) {
      node.outputs.push_back(read_argument(output));
    }
  } catch (const std::exception& error) {
    throw DataError(node.describe() + ": " + message_of(error));
  }
  return node;
}

std::vector<Dimension> read_sizes(const Json& sizes) {
  std::vector<Dimension> dimensions;
  for (const auto& size : sizes) {
    if (size.contains("as_int")) {
      dimensions.push_back({whole_number(size.at("as_int"), 0, "a size"), ""});
    } else {
      dimensions.push_back({0, size.at("as_expr").at("expr_str").get<std::string>()});
    }
  }
  return dimensions;
}

Graph read_graph(const Json& json) {
  Graph graph;
  for (const auto& input : json.at("inputs")) {
    graph.inputs.push_back(read_argument(input));
    if (const auto* name = graph.inputs.back().name()) {
      const auto& values = json.at("tensor_values");
      if (const auto meta = values.find(name->name); meta != values.end()) {
        graph.input_sizes.emplace(name->name, read_sizes(meta->at("sizes")));
        if (meta->contains("dtype")) {
          graph.input_dtypes.emplace(name->name, scalar_type(meta->at("dtype")));
        }
      } else if (json.contains("sym_int_values") && json["sym_int_values"].contains(name->name)) {
        graph.input_sizes.emplace(name->name,
                                  read_sizes(Json::array({json["sym_int_values"][name->name]})));
        graph.number_inputs.insert(name->name);
      }
    }
  }
  if (json.at("nodes").size() > kMaxNodes) {
    throw DataError(
        concat("it has ", json.at("nodes").size(), " nodes, and the limit is ", kMaxNodes));
  }
  for (const auto& node : json.at("nodes")) {
    if (node.at("target") != kMetadataCheck) {
      graph.nodes.push_back(read_node(node));
    }
  }
  for (const auto& output : json.at("outputs")) {
    graph.outputs.push_back(read_argument(output));
  }
  for (const auto& [name, meta] : json.at("tensor_values").items()) {
    if (meta.contains("sizes")) {
      graph.ranks.emplace(name, static_cast<int64_t>(meta["sizes"].size()));
    }
  }
  return graph;
}

InputSpec read_input_spec(const Json& json) {
  const auto [kind, value] = only_entry(json);
  if (kind == "user_input") {
    return {InputKind::User, "", true, {}};
  }
  if (kind == "constant_input") {
    const auto argument = read_argument(value.at("value"));
    const auto* constant = argument.constant();
    if (constant == nullptr) {
      throw DataError("a constant input is no number, text or None");
    }
    return {InputKind::Constant, value.at("name").get<std::string>(), true, *constant};
  }
  if (kind == "parameter") {
    return {InputKind::Parameter, value.at("parameter_name").get<std::string>(), true, {}};
  }
  if (kind == "buffer") {
    return {InputKind::Buffer,
            value.at("buffer_name").get<std::string>(),
            value.at("persistent").get<bool>(),
            {}};
  }
  if (kind == "tensor_constant") {
    return {
        InputKind::TensorConstant, value.at("tensor_constant_name").get<std::string>(), true, {}};
  }
  throw DataError("libddp does not support inputs of the kind " + printable(kind));
}

OutputSpec read_output_spec(const Json& json) {
  const auto [kind, value] = only_entry(json);
  if (kind == "user_output" || kind == "loss_output") {
    return {OutputKind::User, ""};
  }
  if (kind == "buffer_mutation") {
    return {OutputKind::BufferMutation, value.at("buffer_name").get<std::string>()};
  }
  if (kind == "parameter_mutation") {
    return {OutputKind::ParameterMutation, value.at("parameter_name").get<std::string>()};
  }
  throw DataError("libddp does not support outputs of the kind " + printable(kind) +
                  "; fix: export the forward alone");
}

void check_version(const Json& json) {
  const auto& version = json.at("schema_version");
  const auto major = whole_number(version.at("major"), 0, "the schema's version");
  const auto minor = whole_number(version.at("minor"), 0, "the schema's version");
  if (major != kSchemaMajor || minor < kOldestMinor || minor > kNewestMinor) {
    throw DataError(concat("it has version ", major, '.', minor, " of the schema (torch ",
                           printable(json.value("torch_version", "of an unknown version")),
                           "), and this libddp reads ", kSchemaMajor, '.', kOldestMinor, " to ",
                           kSchemaMajor, '.', kNewestMinor,
                           "; fix: export with PyTorch 2.11 to 2.15"));
  }
}

std::map<std::string, Range> read_ranges(const Json& json) {
  std::map<std::string, Range> ranges;
  const auto limit = [](const Json& range, const char* key) -> std::optional<int64_t> {
    const auto found = range.find(key);
    return found == range.end() || found->is_null()
               ? std::nullopt
               : std::optional(
                     whole_number(*found, std::numeric_limits<int64_t>::min(), "a range"));
  };
  for (const auto& [symbol, range] : json.items()) {
    ranges.emplace(symbol, Range{limit(range, "min_val"), limit(range, "max_val")});
  }
  return ranges;
}

void read_signature(const Json& json, ExportedProgram& program) {
  for (const auto& spec : json.at("signature").at("input_specs")) {
    program.inputs.push_back(read_input_spec(spec));
  }
  for (const auto& spec : json.at("signature").at("output_specs")) {
    program.outputs.push_back(read_output_spec(spec));
  }
  std::map<std::string, std::vector<std::string>> namedtuple_fields;
  if (const auto types = json.find("treespec_namedtuple_fields"); types != json.end()) {
    for (const auto& [type, fields] : types->items()) {
      namedtuple_fields.emplace(type, fields.at("field_names").get<std::vector<std::string>>());
    }
  }
  const auto& call = json.at("module_call_graph").at(0).at("signature");
  program.in_spec = read_tree_spec(call.at("in_spec").get<std::string>(), namedtuple_fields);
  program.out_spec = read_tree_spec(call.at("out_spec").get<std::string>(), namedtuple_fields);
  const auto names = call.find("forward_arg_names");
  if (names != call.end() && names->is_array()) {
    program.argument_names = names->get<std::vector<std::string>>();
  }
}

void check_counts(const ExportedProgram& program) {
  std::size_t user_inputs = 0, user_outputs = 0;
  for (const auto& input : program.inputs) {
    user_inputs += input.is_argument();
  }
  for (const auto& output : program.outputs) {
    user_outputs += output.kind == OutputKind::User;
  }
  const auto& in_spec = program.in_spec;
  const bool is_call = in_spec.children.size() == 2 &&
                       in_spec.children[0].kind == TreeSpec::Kind::Tuple &&
                       in_spec.children[1].kind == TreeSpec::Kind::Dict;
  if (!is_call || program.inputs.size() != program.graph.inputs.size() ||
      program.outputs.size() != program.graph.outputs.size() ||
      in_spec.num_leaves() != user_inputs || program.out_spec.num_leaves() != user_outputs) {
    throw DataError("its signature does not fit its graph");
  }
}

// That of the first input whose device the archive says.
at::DeviceType export_device(const Json& graph) {
  const auto& values = graph.at("tensor_values");
  for (const auto& input : graph.at("inputs")) {
    const auto name = input.find("as_tensor");
    const auto value =
        name == input.end() ? values.end() : values.find(name->at("name").get<std::string>());
    if (value != values.end() && value->contains("device")) {
      return device(value->at("device")).constant()->toDevice().type();
    }
  }
  return at::kCPU;
}

}  // namespace

const Argument* Node::input(std::string_view argument) const {
  for (const auto& input : inputs) {
    if (input.name == argument) {
      return &input.value;
    }
  }
  return nullptr;
}

std::string Node::describe() const {
  return concat("node ", printable(name.substr(0, 80)), " (", printable(target.substr(0, 120)), ')',
                python_line.empty() ? "" : ", ", python_line);
}

ExportedProgram read_program(const std::string& text) {
  const auto json = parse_bounded_json<Json>(text, kMaxJsonDepth);
  check_version(json);
  ExportedProgram program;
  const auto& module = json.at("graph_module");
  program.graph = read_graph(module.at("graph"));
  program.device = export_device(module.at("graph"));
  program.ranges = read_ranges(json.at("range_constraints"));
  program.guards = json.value("guards_code", std::vector<std::string>());
  read_signature(module, program);
  check_counts(program);
  return program;
}

}  // namespace ddp::detail
