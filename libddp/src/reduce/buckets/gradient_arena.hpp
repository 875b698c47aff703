// SPDX-License-Identifier: Apache-2.0
// The memory of all gradients of a model. There is one arena per (parameter dtype, gradient dtype).
// An arena is cut into buckets, and a bucket into slots, one per parameter. After a synchronised
// backward .grad of each parameter is its slot (PyTorch: gradient_as_bucket_view).
//
// Not thread safe: BackwardPass calls it with its lock held, others between backwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/collective_label.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/options.hpp"
#include "ops/shared/grad_slot.hpp"
#include "reduce/buckets/bucket_layout.hpp"

namespace ddp {

inline bool chooses_buckets(const DdpOptions& options) {
  return options.bucket_cap_mb == kAutoBuckets;
}
/// The bucket limits in bytes: [first, cap].
std::vector<int64_t> bucket_limits_bytes(const DdpOptions& options);

}  // namespace ddp

namespace ddp::detail {

/// " of model 'generator'"; empty without a name.
inline std::string of_model(const DdpOptions& options) {
  return options.name == DdpOptions().name ? "" : " of model '" + options.name + "'";
}

class GradientArena {
 public:
  /// Allocates the arenas once. Later layouts move offsets inside this memory, so its address stays
  /// valid for captured graphs. `sparse` marks the parameters whose gradients are sparse; empty:
  /// none. A bucket has one unused element for each of them, so that they become ready, stay frozen
  /// or unused as any other parameter. Their slot holds the mean as a sparse tensor
  /// (set_sparse_sum), and no op may write to it.
  GradientArena(NamedParameters parameters, CommunicatorPtr communicator, const DdpOptions& options,
                const std::vector<bool>& sparse = {});
  ~GradientArena();
  GradientArena(const GradientArena&) = delete;
  GradientArena& operator=(const GradientArena&) = delete;

  const NamedParameters& parameters() const { return parameters_; }
  const std::vector<ParameterSpec>& specs() const { return specs_; }
  const BucketLayout& layout() const { return layout_; }
  /// Cuts the arenas again. Gradients that lie in slots move with them. Not allowed while
  /// holds_partial_means().
  void set_layout(BucketLayout layout);
  /// Whether a .grad is the mean in this rank's part only (ZeRO-1). Such a mean cannot move:
  /// another layout gives the rank other parts. It is pending until .grad is made undefined, by the
  /// optimizer's step or by zero_grad.
  bool holds_partial_means() const;

  /// In launch order.
  std::vector<GradBucket>& buckets() { return buckets_; }
  struct BucketMemory {
    at::Tensor buffer;      ///< the flat gradients; a hook may replace GradBucket::buffer
    CollectiveLabel label;  ///< "bucket 4: " and the names of its first and last parameter
  };
  const BucketMemory& bucket(int index) const { return memory_.at(static_cast<size_t>(index)); }
  /// The part of it that has the mean on this rank after a backward: all of it, or after shard()
  /// the rank-th of world_size equal parts.
  const at::Tensor& bucket_shard(int index) const {
    return buckets_.at(static_cast<size_t>(index)).shard;
  }
  /// From now on each rank reduces only its part of each bucket.
  void shard();
  bool is_sharded() const { return is_sharded_; }
  const ops::GradSlot& slot(int parameter) const {
    return gradients_[static_cast<size_t>(parameter)].slot;
  }

  /// Call before publish(): the coalesced sum of all ranks, which the caller divides.
  void set_sparse_sum(int parameter, at::Tensor sum) {
    gradients_[static_cast<size_t>(parameter)].slot.memory = std::move(sum);
  }

  /// Moves .grad out of its slot until publish(), because the reduction overwrites the slot. If
  /// several reducers own the parameter, another one may still read .grad in this backward. A
  /// parameter that is not `used` on this rank may have to keep it.
  void keep_apart(int parameter, bool used = true);
  /// Throws SettingsError if a backward adds to a mean of ZeRO-1. This rank holds only a part of
  /// it.
  void refuse_partial(int parameter) const;
  /// Copies the gradients of bucket `index` into their slots. A parameter without a gradient
  /// contributes zeros. The .grad of a shared parameter stays apart until publish(), and so does
  /// what an earlier backward left in the .grad of a parameter that is not `used` on this rank.
  /// `used` is per parameter; empty stands for all.
  void gather(int index, const std::vector<bool>& used = {});
  /// The same for `parameters`, which got gradients in a backward that is not reduced. Slots
  /// without a gradient and shared parameters stay as they are.
  void gather_local(std::vector<int> parameters);
  /// Makes each slot its parameter's .grad and marks it as reduced. `used` is per parameter; empty
  /// stands for all. A parameter that no rank used keeps its .grad, with its values of before.
  void publish(const std::vector<bool>& used);
  /// Marks every slot as unwritten: after a backward that threw, values of fused ops are invalid.
  void forget_writes();

  /// Moves means of earlier backwards out of the buckets until add_set_aside(). A mean is equal on
  /// all ranks, so a reduction that divides by the number of ranks returns it unchanged. Another
  /// divisor would change it. If .grad is made undefined meanwhile, the mean is dropped. Throws
  /// SettingsError, and moves nothing, if there is a mean and local gradients `are_added` to it.
  void set_reduced_aside(bool are_added = false);
  void add_set_aside();

  /// The gradient of one parameter with its marks.
  struct Saved {
    at::Tensor grad;
    at::Tensor slot_values;  ///< a copy if the caller requested it and .grad was the slot
    at::Tensor set_aside;
    ops::GradSlot slot;
  };
  /// With `copies` the values of gradients that lie in slots are copied, so that the buckets may be
  /// overwritten or cut again before restore().
  std::vector<Saved> save(bool copies) const;
  void restore(const std::vector<Saved>& saved);
  /// Leaves each .grad undefined.
  void drop();

 private:
  struct Gradient {
    ops::GradSlot slot;
    at::Tensor set_aside;
    bool is_apart = false;  ///< .grad is a copy of the slot until publish()
  };

  void allocate(const DdpOptions& options);
  void cut(BucketLayout layout);
  void collect(const std::vector<int>& indices, const std::vector<bool>& used);

  NamedParameters parameters_;
  CommunicatorPtr communicator_;
  const std::string of_model_;
  std::vector<ParameterSpec> specs_;
  std::vector<at::Tensor> arenas_;  // one per key
  BucketLayout layout_;
  std::vector<GradBucket> buckets_;
  std::vector<BucketMemory> memory_;  // by bucket
  std::vector<Gradient> gradients_;   // by parameter
  bool is_sharded_ = false;
};

}  // namespace ddp::detail
