// SPDX-License-Identifier: Apache-2.0
// A plan of measured choices, and the tables and bucket sizes in it.
#include "comm/tuning/all_reduce_table.hpp"
#include "core/files/plan.hpp"
#include "fuzz/fuzz.hpp"
#include "reduce/buckets/bucket_choice.hpp"

namespace {

const std::vector<int64_t> kGradientBytes{4, 8, 16};

void read_plan(const std::string& text) {
  ddp::Plan plan;
  if (!plan.adopt(text, "plan").empty()) {
    return;
  }
  const auto written = plan.to_json();
  ddp::Plan again;
  const auto difference = fuzz::read_back([&] { return again.adopt(written, "again"); });
  fuzz::require(difference.empty(), "a written plan is adopted");
  fuzz::require(again.to_json() == written, "a plan is read back");
  const auto table = plan.find("all_reduce").value_or("[]");
  const auto buckets = plan.find("buckets").value_or("{}");
  (void)fuzz::accepts([&] {
    const auto read = ddp::AllReduceTable::from_json(table);
    const auto back =
        fuzz::read_back([&] { return ddp::AllReduceTable::from_json(read.to_json()); });
    fuzz::require(back.rows() == read.rows(), "a table is read back");
    (void)read.microseconds(1 << 20);
  });
  (void)fuzz::accepts([&] {
    if (const auto read = ddp::detail::BucketChoice::from_json(buckets, kGradientBytes)) {
      const auto text = read->to_json(kGradientBytes);
      const auto back = fuzz::read_back(
          [&] { return ddp::detail::BucketChoice::from_json(text, kGradientBytes); });
      fuzz::require(back && back->cuts == read->cuts, "bucket sizes are read back");
      fuzz::require(read->cuts.size() <= kGradientBytes.size(), "no bucket is empty");
    }
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::string text(fuzz::view(data, size));
  (void)fuzz::accepts([&] { read_plan(text); });
  (void)fuzz::accepts([&] { ddp::Plan().set("choice", text); });
  return 0;
}
