// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/replica_sync.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "comm/collective_label.hpp"
#include "comm/string_collectives.hpp"
#include "core/settings/setting_row.hpp"
#include "ddp/detail/text.hpp"

namespace ddp::detail {
namespace {

void describe_tensors(ddp::detail::TextStream& out, const char* kind,
                      const NamedParameters& tensors) {
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
  ddp::detail::TextStream out;
  out << "libddp version = " << DDP_VERSION_STRING << '\n';
  out << "LibTorch version = " << TORCH_VERSION << '\n';
  for (const auto& row : list_settings("ddp", options)) {
    out << "setting " << row.key << " = " << row.text() << '\n';
  }
  describe_tensors(out, "parameter", tensors.parameters);
  describe_tensors(out, "buffer", tensors.buffers);
  for (const auto& name : tensors.sparse_parameters) {
    out << "sparse gradient of " << name << '\n';
  }
  return out.str();
}

struct Chunk {
  std::vector<at::Tensor> tensors;
  int64_t bytes = 0;
};

// Equal on all ranks, because tensors have the same order and sizes.
std::vector<Chunk> pack(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes) {
  std::map<at::ScalarType, Chunk> open;
  std::vector<Chunk> chunks;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) {
      continue;
    }
    auto& chunk = open[tensor.scalar_type()];
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!chunk.tensors.empty() && chunk.bytes + bytes > chunk_bytes) {
      chunks.push_back(std::exchange(chunk, {}));
    }
    chunk.tensors.push_back(tensor);
    chunk.bytes += bytes;
  }
  for (auto& [dtype, chunk] : open) {
    if (!chunk.tensors.empty()) {
      chunks.push_back(std::move(chunk));
    }
  }
  return chunks;
}

std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    views.push_back(tensor.is_non_overlapping_and_dense()
                        ? flat.as_strided(tensor.sizes(), tensor.strides(), offset)
                        : flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
  return views;
}

}  // namespace

void check_equal_across_ranks(Communicator& communicator, const ModelTensors& tensors,
                              const DdpOptions& options) {
  if (communicator.world_size() == 1) {
    return;
  }
  const std::string mine = fingerprint(tensors, options);
  const std::string reference = broadcast_string(communicator, mine, 0);
  const auto lines = first_different_lines(mine, reference);
  const auto differences = all_gather_string(
      communicator, lines ? concat("rank ", communicator.rank(), " has \"", lines->first,
                                   "\", rank 0 has \"", lines->second, "\"")
                          : "");
  for (const auto& difference : differences) {
    if (!difference.empty()) {
      throw MismatchError(
          "the ranks do not wrap the same model with the same settings: " + difference +
          "; fix: build the module with the same code and configuration on every rank");
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
               "): several of its elements share memory and cannot be sent or updated separately; "
               "fix: register tensor.contiguous()");
      }
      if (tensor.is_complex()) {
        refuse("is of dtype ", tensor.scalar_type(),
               ", which collectives do not support; fix: register torch::view_as_real(tensor) and "
               "use torch::view_as_complex of it in forward");
      }
      if (tensor.requires_grad() && !tensor.is_leaf()) {
        refuse(
            "is not a leaf: an operation computed it, so its gradient goes to the inputs of the "
            "operation; fix: register tensor.detach().requires_grad_(), or compute it in forward");
      }
    }
  };
  check("parameter", tensors.parameters);
  check("buffer", tensors.buffers);
}

void broadcast_coalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                         int root, int64_t chunk_bytes) {
  if (communicator.world_size() == 1) {
    return;
  }
  static const auto label = make_label("tensors of the model");
  const LabelScope scope(label);
  const at::NoGradGuard no_grad;
  for (const auto& chunk : pack(tensors, chunk_bytes)) {
    if (chunk.tensors.size() == 1 && chunk.tensors[0].is_non_overlapping_and_dense()) {
      communicator.broadcast(chunk.tensors[0].detach(), root)->wait();
      // A communicator writes memory without raising the version. Below, ATen's copy raises it.
      if (communicator.rank() != root) {
        chunk.tensors[0].unsafeGetTensorImpl()->bump_version();
      }
      continue;
    }
    int64_t numel = 0;
    for (const auto& tensor : chunk.tensors) {
      numel += tensor.numel();
    }
    auto flat = at::empty({numel}, chunk.tensors[0].options().requires_grad(false));
    auto views = views_of(flat, chunk.tensors);
    if (communicator.rank() == root) {
      at::_foreach_copy_(views, chunk.tensors);
    }
    communicator.broadcast(flat, root)->wait();
    if (communicator.rank() != root) {
      at::_foreach_copy_(chunk.tensors, views);
    }
  }
}

void seed_ranks_differently(int rank) {
  if (rank == 0) {
    return;
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  std::unique_lock lock(generator.mutex());
  const uint64_t draw = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  lock.unlock();  // manual_seed locks it too
  // The CPU generator uses 32 bits of a seed. At the first wrapping all ranks have the same draw,
  // so the sums differ in these bits too. Later draws differ, and equal sums are a coincidence.
  at::manual_seed(draw + static_cast<uint64_t>(rank));
}

}  // namespace ddp::detail
