// SPDX-License-Identifier: Apache-2.0
#include "core/files/plan.hpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "core/files/plan_file.hpp"
#include "ddp/core/error.hpp"
#include "support/catch.hpp"

using ddp::Plan;

namespace {

const Plan::Identity kHere{{"gpu", "NVIDIA H200"}, {"nccl", "22809"}};

class TemporaryFile {
 public:
  TemporaryFile() {
    char name[] = "/tmp/ddp_plan_XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~TemporaryFile() {
    std::remove(path().c_str());
    std::remove(folder_.c_str());
  }
  std::string path() const { return folder_ + "/plan.json"; }

 private:
  std::string folder_;
};

}  // namespace

TEST_CASE("a plan of the same system is pinned") {
  Plan plan(kHere);
  CHECK(plan.empty());
  plan.set("all_reduce", "[[4096, 6.5, 4.25]]");
  plan.set("buckets", R"({"cuts": [3, 9]})");

  Plan other(kHere);
  other.set("buckets", "[]");
  other.set("engine", "7");
  const auto before = other.version();
  CHECK(other.adopt(plan.to_json(), "a test").empty());
  CHECK(other.version() > before);
  CHECK(other.find("all_reduce") == "[[4096,6.5,4.25]]");
  CHECK(other.find("buckets") == R"({"cuts":[3,9]})");
  CHECK(other.find("engine") == "7");  // not in the other plan: unchanged
  CHECK_FALSE(other.find("nothing").has_value());
}

TEST_CASE("a plan of another system changes nothing, and the difference is told") {
  Plan theirs(Plan::Identity{{"gpu", "NVIDIA H100 PCIe"}, {"nccl", "22809"}});
  theirs.set("all_reduce", "[]");
  Plan plan(kHere);
  const auto before = plan.version();
  CHECK(plan.adopt(theirs.to_json(), "a test") == "gpu: NVIDIA H100 PCIe, here NVIDIA H200");
  CHECK(plan.empty());
  CHECK(plan.version() == before);

  Plan older(Plan::Identity{{"gpu", "NVIDIA H200"}});
  CHECK(plan.adopt(older.to_json(), "a test") == "nccl: unknown, here 22809");
}

TEST_CASE("a plan of an earlier version is pinned if NCCL's own kernels were measured") {
  for (const std::string windows : {"no", "copies", "yes"}) {
    auto identity = kHere;
    identity["windows"] = windows;
    Plan earlier(identity);
    earlier.set("all_reduce", "[]");
    Plan plan(kHere);
    const auto difference = plan.adopt(earlier.to_json(), "a test");
    CHECK(difference == (windows == "no" ? "" : "windows: " + windows + ", here no"));
    CHECK(plan.empty() == (windows != "no"));
  }
}

TEST_CASE("what is no plan is refused by name") {
  Plan plan(kHere);
  const auto damaged = GENERATE(as<std::string>(), "", "{", "[]", R"({"choices": {}})",
                                R"({"measured on": {"gpu": 3}, "choices": {}})",
                                R"({"measured on": {}, "choices": []})");
  CHECK_THROWS_AS(plan.adopt(damaged, "plan.json"), ddp::ReadError);
  CHECK_THROWS_WITH(plan.adopt(damaged, "plan.json"), Catch::Contains("plan.json"));
  CHECK_THROWS_AS(plan.set("x", "{"), ddp::SettingsError);
}

TEST_CASE("a plan file is written whole and read back") {
  const TemporaryFile file;
  CHECK(ddp::read_plan_file(file.path()).empty());
  Plan plan(kHere);
  plan.set("all_reduce", "[1]");
  ddp::write_plan_file(file.path(), plan);
  plan.set("all_reduce", "[2]");
  ddp::write_plan_file(file.path(), plan);
  Plan read(kHere);
  CHECK(read.adopt(ddp::read_plan_file(file.path()), file.path()).empty());
  CHECK(read.find("all_reduce") == "[2]");
  CHECK_THROWS_AS(ddp::read_plan_file("/tmp"), ddp::ReadError);
  CHECK_THROWS_AS(ddp::write_plan_file(file.path() + "/no/folder", plan), ddp::WriteError);
}

TEST_CASE("a plan that is nested too deeply is refused") {
  Plan plan(kHere);
  plan.set("buckets", R"({"cuts": [[[3]]]})");
  const auto good = plan.to_json();
  CHECK(Plan(kHere).adopt(good, "a test").empty());
  const auto deep = [&](std::size_t levels) {
    auto text = good;
    const auto place = text.find("[");
    return text.replace(place, 0, std::string(levels, '['))
        .insert(place + levels, "0" + std::string(levels, ']') + ",\"x\": ");
  };
  for (const std::size_t levels : {20, 300'000}) {
    Plan other(kHere);
    try {
      other.adopt(deep(levels), "runs/plan.json");
      FAIL("accepted");
    } catch (const ddp::ReadError& error) {
      CHECK_THAT(error.what(), Catch::StartsWith("runs/plan.json is not a plan") &&
                                   Catch::Contains("nested too deeply"));
    }
    CHECK(other.empty());
    CHECK_THROWS_AS(other.set("x", std::string(levels, '[') + "0" + std::string(levels, ']')),
                    ddp::SettingsError);
  }
  CHECK_THROWS_AS(plan.adopt(good + std::string(1, '\0') + "more", "a test"), ddp::ReadError);
}
