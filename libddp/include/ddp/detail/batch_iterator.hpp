// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

namespace ddp::detail {

/// The next `left` batches of a loader.
template <typename Loader>
class BatchIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = typename Loader::BatchType;
  using difference_type = std::ptrdiff_t;
  using pointer = value_type*;
  using reference = value_type&;

  BatchIterator(Loader* loader, int64_t left) : loader_(loader), left_(left) { load(); }
  reference operator*() { return *batch_; }
  pointer operator->() { return &*batch_; }
  BatchIterator& operator++() {
    batch_.reset();
    --left_;
    load();
    return *this;
  }
  bool operator!=(const BatchIterator& other) const { return left_ != other.left_; }
  bool operator==(const BatchIterator& other) const { return left_ == other.left_; }

 private:
  void load() {
    if (left_ > 0) {
      batch_.emplace(loader_->next());
    }
  }

  Loader* loader_;
  int64_t left_;
  std::optional<value_type> batch_;
};

}  // namespace ddp::detail
