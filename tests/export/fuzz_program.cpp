// SPDX-License-Identifier: Apache-2.0
// A libFuzzer target: bytes as the program of an archive, or as a whole archive (if they begin with
// "PK").
//
//   scripts/fuzz_export.sh SECONDS
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/export/exported_module.hpp"
#include "export/checkpoint_blocks.hpp"
#include "export/graph.hpp"
#include "export/graph_plan.hpp"
#include "export/guards.hpp"
#include "export/input_shapes.hpp"
#include "export/training_mode.hpp"
#include "nlohmann/json.hpp"

// Instead of the library's log, which would print a line for most inputs.
void ddp::log_warning(const std::string& /*message*/) {}

namespace {

// Everything that is done with a program before its first call.
void read(const std::string& text) {
  const auto program = ddp::detail::read_program(text);
  const ddp::detail::InputShapes shapes(program);
  const ddp::detail::Guards guards(program);
  const ddp::detail::GraphPlan plan(program.graph);
  auto blocks = program;
  ddp::detail::checkpoint_blocks(blocks, {"*"});
  const ddp::detail::GraphPlan plan_of_blocks(blocks.graph);
  const bool training = ddp::detail::is_training_graph(program.graph, true);
  ddp::detail::GraphPlan(ddp::detail::with_mode(program, !training).graph);
}

void open(const uint8_t* data, std::size_t size) {
  static const std::string path = "/dev/shm/ddp_fuzz_" + std::to_string(::getpid()) + ".pt2";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  ddp::ExportedModule module(path);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  try {
    if (size > 2 && data[0] == 'P' && data[1] == 'K') {
      open(data, size);
    } else {
      read({reinterpret_cast<const char*>(data), size});
    }
  } catch (const ddp::Error&) {
  } catch (const nlohmann::json::exception&) {  // ExportedModule turns it into a DataError
  }
  return 0;
}
