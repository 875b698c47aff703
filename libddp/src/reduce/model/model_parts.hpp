// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "core/listeners.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "reduce/model/frozen_parameters.hpp"
#include "reduce/model/model_state.hpp"
#include "reduce/reducer.hpp"

namespace ddp {

namespace detail {
/// nullopt if the state has no effect: in evaluation, on one rank, or without buffers.
std::optional<BufferBroadcast::State> deciding_buffer_state(const DataParallelModel& model);
}  // namespace detail

struct DataParallelModel::Parts {
  ModelTensors tensors;  // without ddp.parameters_to_ignore
  detail::ModelState state;
  CommunicatorPtr communicator;
  DdpOptions options;
  std::unique_ptr<detail::FrozenParameters> frozen = nullptr;
  std::unique_ptr<Reducer> reducer = nullptr;
  int no_sync_depth = 0;  // number of living NoSyncs
  JoinScope* join = nullptr;
  detail::Listeners exact_sync_listeners = {};
  detail::Listeners join_listeners = {};

  /// Collective, see FrozenParameters::update().
  void update_frozen() const {
    frozen->update(join != nullptr, detail::of_model(options), reducer->runs_in_graphs());
  }
};

}  // namespace ddp
