// SPDX-License-Identifier: Apache-2.0
// An archive of torch.export (an input that begins with "PK"), or the program in one.
#include "ddp/export/exported_module.hpp"
#include "export/checkpoint_blocks.hpp"
#include "export/fusion/fusion.hpp"
#include "export/graph.hpp"
#include "export/graph_plan.hpp"
#include "export/guards.hpp"
#include "export/input_shapes.hpp"
#include "export/training_mode.hpp"
#include "fuzz/fuzz.hpp"
#include "nlohmann/json.hpp"

namespace {

// Everything that is done with a program before its first call.
void read(const std::string& text) {
  const auto program = ddp::detail::read_program(text);
  const ddp::detail::InputShapes shapes(program);
  const ddp::detail::Guards guards(program);
  const ddp::detail::GraphPlan plan(program.graph);
  auto fused = program;
  ddp::detail::fuse(fused);
  const ddp::detail::GraphPlan plan_of_ops(fused.graph);
  auto blocks = program;
  ddp::detail::checkpoint_blocks(blocks, {"*"});
  const ddp::detail::GraphPlan plan_of_blocks(blocks.graph);
  const bool training = ddp::detail::is_training_graph(program.graph, true);
  ddp::detail::GraphPlan(ddp::detail::with_mode(program, !training).graph);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const auto input = fuzz::view(data, size);
  try {
    if (input.starts_with("PK")) {
      const auto path = fuzz::write_file("input.pt2", input);
      (void)fuzz::accepts([&] { ddp::ExportedModule module(path); });
    } else {
      (void)fuzz::accepts([&] { read(std::string(input)); });
    }
  } catch (const nlohmann::json::exception&) {  // ExportedModule turns it into a DataError
  }
  return 0;
}
