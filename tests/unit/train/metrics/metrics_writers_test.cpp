// SPDX-License-Identifier: Apache-2.0
// The columns of CSV files when rows get more of them, or others.
#include "train/metrics/files/metrics_writers.hpp"
#include "support/catch.hpp"
#include "train/metrics/metrics_format.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using ddp::detail::csv_field;
using ddp::detail::csv_fields;
using ddp::detail::CsvWriter;
using ddp::detail::RunFolder;
using testing::read_file;
using testing::TemporaryFolder;

}  // namespace

TEST_CASE("a CSV file gets the columns that later rows bring") {
  TemporaryFolder folder;
  RunFolder run(folder.path(), "run");
  CsvWriter writer(run);
  writer.write("steps", {{.name = "step", .integer = 1}, {.name = "loss", .number = 0.5}});
  writer.write("steps", {{.name = "step", .integer = 2},
                         {.name = "fid, 10k", .number = 8},
                         {.name = "loss", .number = 0.25}});
  writer.write("steps", {{.name = "step", .integer = 3}, {.name = "loss", .number = 0.125}});
  CHECK(read_file(folder.file("run/steps.csv")) ==
        "step,loss,\"fid, 10k\"\n1,0.5,\n2,0.25,8\n3,0.125,\n");
}

TEST_CASE("a run that continues keeps the order of the file's columns") {
  TemporaryFolder folder;
  {
    RunFolder run(folder.path(), "run");
    CsvWriter(run).write("steps", {{.name = "a", .integer = 1}, {.name = "b", .text = "x, \"y\""}});
  }
  RunFolder run(folder.path(), "run");
  CsvWriter(run).write("steps", {{.name = "b", .text = "z"}, {.name = "c", .integer = 3}});
  CHECK(read_file(folder.file("run/steps.csv")) == "a,b,c\n1,\"x, \"\"y\"\"\",\n,z,3\n");
}

TEST_CASE("the fields of a CSV line are what was written") {
  const std::vector<std::string> fields = {"step", "a, b", "", "\"quoted\"", "x"};
  std::string line;
  for (const auto& field : fields) {
    line += (line.empty() ? "" : ",") + csv_field(field);
  }
  CHECK(csv_fields(line) == fields);
}
