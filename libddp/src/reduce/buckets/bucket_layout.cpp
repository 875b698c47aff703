// SPDX-License-Identifier: Apache-2.0
#include "reduce/buckets/bucket_layout.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "ddp/detail/check.hpp"

namespace ddp {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The number of elements between aligned places. A bucket is padded to a multiple of this times the
// world size, so that every rank's shard of a bucket is aligned too.
int64_t alignment_elements(const ParameterSpec& parameter, const BucketLayoutOptions& options) {
  return std::max<int64_t>(1, options.alignment_bytes / parameter.element_bytes);
}

struct OpenBucket {
  std::vector<int> parameters;
  int64_t bytes = 0;
};

struct ClosedBucket {
  int key = 0;
  std::vector<int> parameters;
  int launch = 0;  // buckets of equal number closed together
};

// Assigns parameters to buckets; places are assigned later.
std::vector<ClosedBucket> group_parameters(const std::vector<ParameterSpec>& parameters,
                                           const BucketLayoutOptions& options,
                                           const std::vector<int>& order) {
  const auto& limits = options.limits_bytes;
  std::vector<ClosedBucket> closed;
  int launch = 0;
  size_t next_cut = 0;
  int num_taken = 0;
  std::map<int, OpenBucket> open;
  std::map<int, size_t> cursor;
  const auto close_all = [&] {
    for (auto& [key, bucket] : open) {
      if (!bucket.parameters.empty()) {
        closed.push_back({key, std::move(bucket.parameters), launch});
        bucket = {};
      }
    }
    ++launch;
  };
  for (int index : order) {
    if (next_cut < options.cuts.size() && num_taken++ == options.cuts[next_cut]) {
      close_all();
      ++next_cut;
    }
    const auto& spec = parameters[static_cast<size_t>(index)];
    auto& bucket = open[spec.key];
    bucket.parameters.push_back(index);
    bucket.bytes += spec.numel * spec.element_bytes;
    auto& limit = cursor[spec.key];
    if (options.cuts.empty() && !limits.empty() && bucket.bytes >= limits[limit]) {
      closed.push_back({spec.key, std::move(bucket.parameters), launch++});
      bucket = {};
      limit = std::min(limit + 1, limits.size() - 1);
    }
  }
  close_all();  // the last buckets of all dtypes form one group
  return closed;
}

}  // namespace

BucketLayout assign_buckets(const std::vector<ParameterSpec>& parameters,
                            const BucketLayoutOptions& options, const std::vector<int>& order) {
  std::vector<int> sequence(parameters.size());
  std::iota(sequence.begin(), sequence.end(), 0);
  if (!order.empty()) {
    DDP_CHECK(std::is_permutation(order.begin(), order.end(), sequence.begin(), sequence.end()),
              "the order must name every parameter once");
    sequence = order;
  }
  DDP_CHECK(options.cuts.empty() || !order.empty(), "cuts need the order they were chosen for");
  auto lists = group_parameters(parameters, options, sequence);
  if (order.empty()) {
    std::stable_sort(lists.begin(), lists.end(), [](const auto& a, const auto& b) {
      return *std::min_element(a.parameters.begin(), a.parameters.end()) <
             *std::min_element(b.parameters.begin(), b.parameters.end());
    });
    std::reverse(lists.begin(), lists.end());
  }

  BucketLayout layout;
  layout.places.resize(parameters.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    const int key = lists[i].key;
    if (layout.arena_numel.size() <= static_cast<size_t>(key)) {
      layout.arena_numel.resize(static_cast<size_t>(key) + 1);
    }
    auto& arena_end = layout.arena_numel[static_cast<size_t>(key)];
    Bucket bucket{.key = key,
                  .parameters = std::move(lists[i].parameters),
                  .offsets = {},
                  .begin = arena_end,
                  .numel = 0,
                  .launch = 0};
    if (i > 0) {
      const int before = layout.buckets.back().launch;
      bucket.launch = lists[i].launch == lists[i - 1].launch ? before : before + 1;
    }
    const int64_t aligned =
        alignment_elements(parameters[static_cast<size_t>(bucket.parameters.front())], options);
    for (int index : bucket.parameters) {
      layout.places[static_cast<size_t>(index)] = {
          .bucket = static_cast<int>(layout.buckets.size()),
          .index = static_cast<int>(bucket.offsets.size())};
      bucket.offsets.push_back(bucket.numel);
      bucket.numel += round_up(parameters[static_cast<size_t>(index)].numel, aligned);
    }
    bucket.numel = round_up(bucket.numel, aligned * options.membership.world_size);
    arena_end += bucket.numel;
    layout.buckets.push_back(std::move(bucket));
  }
  return layout;
}

int64_t max_arena_numel(const std::vector<ParameterSpec>& parameters,
                        const BucketLayoutOptions& options, int key) {
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t aligned = 1;
  int64_t count = 0;
  for (const auto& spec : parameters) {
    if (spec.key == key) {
      aligned = alignment_elements(spec, options);
      elements += round_up(spec.numel, aligned);
      bytes += spec.numel * spec.element_bytes;
      ++count;
    }
  }
  // Every closed bucket but the last holds at least the smallest limit.
  int64_t buckets = 1;
  if (!options.limits_bytes.empty()) {
    const int64_t smallest = std::max<int64_t>(
        1, *std::min_element(options.limits_bytes.begin(), options.limits_bytes.end()));
    buckets = std::min(count, bytes / smallest + 1);
  }
  return elements + buckets * aligned * options.membership.world_size;
}

}  // namespace ddp
