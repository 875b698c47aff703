// SPDX-License-Identifier: Apache-2.0
#include "reduce/model_check.hpp"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/version.h>

#include <sstream>
#include <string>
#include <vector>

#include "core/setting_row.hpp"
#include "reduce/replica_sync.hpp"

namespace ddp::detail {
namespace {

void describe_tensors(std::ostringstream& out, const char* kind, const NamedParameters& tensors) {
  out << "number of " << kind << "s = " << tensors.size() << '\n';
  for (const auto& [name, tensor] : tensors) {
    out << kind << ' ' << name << ": shape " << tensor.sizes() << ", strides " << tensor.strides()
        << ", " << tensor.scalar_type() << ", on " << tensor.device().type() << ", requires_grad "
        << (tensor.requires_grad() ? "true" : "false") << (tensor.is_leaf() ? "" : ", no leaf")
        << '\n';
  }
}

// One line per fact, so that the first line that differs is the first difference.
std::string fingerprint(const ModelTensors& tensors, const DdpOptions& options) {
  std::ostringstream out;
  out << "libddp version = " << DDP_VERSION_STRING << '\n';
  out << "LibTorch version = " << TORCH_VERSION << '\n';
  for (const auto& row : list_settings("ddp", options)) {
    out << "setting " << row.key << " = " << row.text() << '\n';
  }
  describe_tensors(out, "parameter", tensors.parameters);
  describe_tensors(out, "buffer", tensors.buffers);
  return out.str();
}

// "rank 2 has: …; rank 0 has: …" for the first line that differs, or nothing.
std::string first_difference(const std::string& mine, const std::string& reference, int rank) {
  std::istringstream my_lines(mine);
  std::istringstream reference_lines(reference);
  std::string my_line;
  std::string reference_line;
  while (true) {
    const bool more_mine = static_cast<bool>(std::getline(my_lines, my_line));
    const bool more_reference = static_cast<bool>(std::getline(reference_lines, reference_line));
    if (!more_mine && !more_reference) {
      return "";
    }
    if (!more_mine || !more_reference || my_line != reference_line) {
      return concat("rank ", rank, " has \"", more_mine ? my_line : "nothing more",
                    "\", rank 0 has \"", more_reference ? reference_line : "nothing more", "\"");
    }
  }
}

}  // namespace

void check_equal_across_ranks(Communicator& communicator, const ModelTensors& tensors,
                              const DdpOptions& options) {
  if (communicator.world_size() == 1) {
    return;
  }
  const std::string mine = fingerprint(tensors, options);
  const std::string reference = broadcast_string(communicator, mine, 0);
  const auto differences =
      all_gather_string(communicator, first_difference(mine, reference, communicator.rank()));
  for (const auto& difference : differences) {
    if (!difference.empty()) {
      throw MismatchError(
          "the ranks do not wrap the same model with the same settings: " + difference +
          ". Build the module alike on every rank (same code, same configuration)");
    }
  }
}

void check_supported(const ModelTensors& tensors) {
  const auto check = [](const char* kind, const NamedParameters& named) {
    for (const auto& [name, tensor] : named) {
      const auto refuse = [&, &name = name](const auto&... why) {
        throw SettingsError(concat(kind, ' ', name, ' ', why...));
      };
      if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
        refuse("is an expanded tensor (shape ", tensor.sizes(), ", strides ", tensor.strides(),
               "): several of its elements share memory and cannot be sent or updated one by one. "
               "Register tensor.contiguous() instead");
      }
      if (tensor.is_complex()) {
        refuse("is of dtype ", tensor.scalar_type(),
               ", which collectives do not carry: register torch::view_as_real(tensor) and take "
               "torch::view_as_complex of it in forward");
      }
      if (tensor.requires_grad() && !tensor.is_leaf()) {
        refuse(
            "is no leaf: an operation computed it, so its gradient goes to the inputs of the "
            "operation. Register tensor.detach().requires_grad_(), or compute it in forward");
      }
    }
  };
  check("parameter", tensors.parameters);
  check("buffer", tensors.buffers);
}

}  // namespace ddp::detail
