// SPDX-License-Identifier: Apache-2.0
// The types of a DataLoader's samples and batches, with a readable error for each unsuitable type.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/data/dataset.hpp"
#include "ddp/detail/visit_tensors.hpp"

namespace ddp::detail {

template <typename DatasetT>
auto get_example(DatasetT& dataset, int64_t index, int64_t epoch) {
  if constexpr (requires { dataset.get_for_epoch(index, epoch); }) {
    return dataset.get_for_epoch(index, epoch);
  } else {
    return dataset.get(index);
  }
}

template <typename DatasetT>
using ExampleOf = decltype(get_example(std::declval<DatasetT&>(), int64_t{}, int64_t{}));

template <typename DatasetT>
concept HasSize = requires(DatasetT& dataset) {
  { dataset.size() } -> std::convertible_to<int64_t>;
};
template <typename DatasetT>
concept HasExamples = requires(DatasetT& dataset, int64_t index) {
  dataset.get(index);
}
|| requires(DatasetT& dataset, int64_t index) {
  dataset.get_for_epoch(index, index);
};
/// Dataset's own get_for_epoch() does not count.
template <typename DatasetT>
concept HasEpochs = requires(DatasetT& dataset, int64_t index) {
  dataset.get_for_epoch(index, index);
}
&&!requires {
  requires std::same_as<decltype(&DatasetT::get_for_epoch), decltype(&Dataset::get_for_epoch)>;
};
template <typename DatasetT>
concept HasBatches = requires(DatasetT& dataset, std::vector<int64_t> indices) {
  dataset.get_batch(std::move(indices));
};

/// Whether get_batch() makes the batches. A collate function of the user's takes precedence.
template <typename DatasetT, typename Collate>
inline constexpr bool kGetsBatches = HasBatches<DatasetT>&& std::same_as<Collate, DefaultCollate>;

// The result is void after an error: one mistake gives one message. The assertions name constants,
// because GCC explains each failed concept in ten more lines.
template <typename DatasetT, typename Collate>
constexpr auto find_batch_type() {
  if constexpr (kGetsBatches<DatasetT, Collate>) {
    constexpr bool has_epochs = HasEpochs<DatasetT>;
    static_assert(!has_epochs,
                  "a data set for ddp::DataLoader has get_batch(), which knows no epoch, or "
                  "get_for_epoch(): remove one of them or pass a collate function");
    using BatchT = decltype(std::declval<DatasetT&>().get_batch(std::vector<int64_t>()));
    static_assert(!std::is_void_v<BatchT>,
                  "get_batch() of a data set for ddp::DataLoader must return the batch");
    return std::type_identity<std::remove_cvref_t<BatchT>>();
  } else if constexpr (!HasExamples<DatasetT>) {
    constexpr bool has_get = HasExamples<DatasetT>;
    static_assert(has_get,
                  "a data set for ddp::DataLoader needs get(int64_t index), get_for_epoch(index, "
                  "epoch) or get_batch(indices); if it is const, these must be const too");
    return std::type_identity<void>();
  } else if constexpr (std::is_void_v<ExampleOf<DatasetT>>) {
    constexpr bool returns_sample = !std::is_void_v<ExampleOf<DatasetT>>;
    static_assert(returns_sample,
                  "get() or get_for_epoch() of a data set for ddp::DataLoader must return the "
                  "sample");
    return std::type_identity<void>();
  } else if constexpr (!std::invocable<Collate&, std::vector<ExampleOf<DatasetT>>>) {
    constexpr bool is_default = std::same_as<Collate, DefaultCollate>;
    static_assert(!is_default,
                  "ddp::DataLoader needs a collate function for samples that are not ddp::Example: "
                  "pass one that takes a std::vector of get()'s results as its last argument");
    static_assert(is_default,
                  "the collate function of a ddp::DataLoader must take a std::vector of what the "
                  "data set's get() returns");
    return std::type_identity<void>();
  } else {
    using BatchT = std::invoke_result_t<Collate&, std::vector<ExampleOf<DatasetT>>>;
    static_assert(!std::is_void_v<BatchT>,
                  "the collate function of a ddp::DataLoader must return the batch");
    return std::type_identity<std::remove_cvref_t<BatchT>>();
  }
}

template <typename DatasetT, typename Collate>
struct LoaderTypes {
  static constexpr bool kHasSize = HasSize<DatasetT>;
  static_assert(kHasSize,
                "a data set for ddp::DataLoader needs int64_t size() const, its number of samples");
  using Found = typename decltype(find_batch_type<DatasetT, Collate>())::type;
  static constexpr bool kKnowsTensors = std::is_void_v<Found> || knows_tensors<Found>();
  static_assert(kKnowsTensors,
                "ddp::DataLoader does not know the tensors of its batches: define "
                "for_each_tensor(MyBatch&, const ddp::TensorVisitor&) beside the type of the batch "
                "or of its elements (ddp/core/visit_tensors.hpp)");
  static constexpr bool kValid = kHasSize && !std::is_void_v<Found> && kKnowsTensors;
  using BatchType = std::conditional_t<std::is_void_v<Found>, Batch, Found>;
};

}  // namespace ddp::detail
