// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective_label.hpp"
#include "core/listeners.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "optim/muon/batches.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"

namespace ddp::detail {

/// Muon for matrices and AdamW for all other parameters (docs/muon.md). The ranks of a model divide
/// the batches of matrices. Momentum and masters of a batch exist on its owner only:
///
///   backward | all-reduce of buckets, as with every optimizer: each rank has all gradients
///   step     | update own batches, copy their weights into this rank's part of a buffer
///            | all-gather the buffer; meanwhile AdamW updates the other parameters here
///            | copy the buffer into the matrices
class MuonOptimizer final : public Optimizer {
 public:
  struct Parts {
    std::vector<ParameterSettings> parameters;     ///< all, in order
    MuonSplit split;                               ///< of them
    std::unique_ptr<Optimizer> rest;               ///< AdamW; nullptr: Muon updates all parameters
    DataParallelModel* model = nullptr;            ///< nullptr: this process owns all batches
    at::ScalarType product_dtype = at::kBFloat16;  ///< tests: float32
  };
  MuonOptimizer(Parts parts, const MuonOptions& options);

  using Optimizer::step;
  /// Collective if the model has several ranks.
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  bool scales_gradients_in_step() const override;

  /// Momentum and masters of this rank's batches (as parts if there are several ranks), and the
  /// state of the rest.
  StateDict state_dict() const override;
  /// The state may be whole, or have parts of any number of ranks.
  void load_state_dict(const StateDict& state) override;
  StateDict replicated_state() const override;  ///< that of the rest; without other owners all

 private:
  // What one all-gather sends: the matrices of one dtype, in equal parts of the ranks.
  struct Exchange {
    struct Piece {
      size_t batch;
      size_t member;
      int64_t offset;  // in elements of the whole buffer
    };
    CollectiveLabel label;
    at::ScalarType dtype;
    int64_t part = 0;           // elements of one rank
    std::vector<Piece> pieces;  // of all ranks
    at::Tensor buffer = {};     // during a step
    WorkPtr work = nullptr;
  };

  bool owns(const MuonBatch& batch) const;
  void plan_exchanges();
  void prepare_members();
  void make_state(MuonBatch& batch, size_t index) const;
  void load_member(MuonBatch& batch, size_t index, const StateDict* state) const;
  void restart_masters();
  void update(const MuonBatch& batch, const StepScalars& scalars) const;
  void start(Exchange& exchange) const;
  void finish(Exchange& exchange) const;
  void step_rest(const StepScalars& scalars);
  at::Tensor slot_of(const Exchange& exchange, const Exchange::Piece& piece) const;
  StateDict take_rest(StateDict& state) const;

  MuonOptions options_;
  NamedParameters parameters_;  // all
  NamedParameters matrices_;    // of the batches
  std::unique_ptr<Optimizer> rest_;
  CommunicatorPtr communicator_;  // nullptr: this process owns all batches
  at::ScalarType product_dtype_;
  std::vector<MuonBatch> batches_;
  std::vector<Exchange> exchanges_;  // empty without other ranks
  Listeners::Token on_exact_sync_;
  Listeners::Token on_join_;
};

}  // namespace ddp::detail
