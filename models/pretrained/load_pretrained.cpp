// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "ddp/core/error.hpp"
#include "ddp/detail/files.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "pretrained/stored_weights.hpp"
#include "pretrained/weight_stream.hpp"

namespace models {
namespace {

using ddp::concat;
using detail::MatchedWeights;
using detail::StoredTensor;
using detail::StoredWeights;

// Hash of everything that the ranks of a shared load must agree on; the sign keeps it positive.
int64_t plan_hash(const StoredWeights& stored, const MatchedWeights& weights, bool shared) {
  std::string text = shared ? "shared" : "mapped";
  for (const auto& [name, tensor] : weights) {
    text += concat(name, '\0', tensor->dtype, tensor->file, '/', tensor->offset, '+',
                   tensor->num_bytes, '\n');
  }
  text += concat(stored.files.size());
  return static_cast<int64_t>(ddp::xxh3(text) >> 1);
}

// Throws on all ranks if any rank has an `error` or the hashes differ.
void agree(ddp::Communicator* communicator, const std::exception_ptr& error, int64_t hash,
           const std::string& source) {
  if (communicator != nullptr && communicator->world_size() > 1) {
    auto votes = at::tensor({int64_t{error ? 0 : 1}, hash, -hash}).to(communicator->device());
    communicator->all_reduce(votes, ddp::ReduceOp::Min)->wait();
    votes = votes.cpu();
    const auto* vote = votes.const_data_ptr<int64_t>();
    if (vote[0] == 0 && !error) {
      throw ddp::ReadError("the weights in " + source +
                           " could not be loaded on another rank, whose message has the reason");
    }
    if (vote[0] != 0 && vote[1] != -vote[2]) {
      throw ddp::MismatchError("the ranks see different weights in " + source +
                               "; fix: the path must be the same file on every node");
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void load_mapped(const StoredWeights& stored, const MatchedWeights& weights,
                 torch::nn::Module& module) {
  for (std::size_t file = 0; file < stored.files.size(); ++file) {  // one mapping at a time
    const auto on_disk = ddp::load_safetensors(stored.files[file]).tensors;
    ddp::TensorMap tensors;
    for (const auto& [name, tensor] : weights) {
      if (tensor->file == file) {
        tensors.emplace(name, on_disk.at(tensor->name));
      }
    }
    ddp::load_weights(module, tensors, stored.files[file], /*strict=*/false);
  }
}

// Converts the exception being handled. LibTorch's own have no exit code, and a backtrace in their
// text.
std::exception_ptr read_failure(const std::string& source) {
  const auto failure = [&](const std::string& why) {
    return std::make_exception_ptr(
        ddp::ReadError("the weights in " + source + " could not be loaded: " + why));
  };
  try {
    throw;
  } catch (const c10::Error& error) {
    return failure(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return failure("there is not enough memory");
  } catch (...) {
    return std::current_exception();
  }
}

int thread_count(int64_t wanted, ddp::Communicator* communicator) {
  const int64_t ranks = communicator == nullptr ? 1 : communicator->world_size();
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(wanted > 0 ? wanted : std::clamp<int64_t>(cores / ranks, 1, 8));
}

void load_shared(const StoredWeights& stored, const MatchedWeights& weights,
                 const ddp::TensorMap& module, ddp::Communicator* communicator,
                 const PretrainedLoadOptions& options,
                 const std::function<void(std::exception_ptr)>& agree_on) {
  std::vector<detail::WeightCopy> copies;
  for (const auto& [name, tensor] : weights) {
    copies.push_back({.file = tensor->file,
                      .offset = tensor->offset,
                      .num_bytes = tensor->num_bytes,
                      .dtype = detail::weight_dtype(*tensor),
                      .target = module.at(name)});
  }
  std::sort(copies.begin(), copies.end(), [](const auto& a, const auto& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  if (copies.empty()) {
    return;
  }
  detail::stream_weights(stored.files, copies, copies.front().target.device(), communicator,
                         {.num_threads = thread_count(options.num_threads, communicator),
                          .chunk_bytes = static_cast<uint64_t>(options.chunk_mb) << 20},
                         agree_on);
}

// True if the Shared route is wanted and the module's tensors allow it.
bool takes_shared_route(const ddp::TensorMap& module, const PretrainedLoadOptions& options) {
  const bool wanted =
      options.route == WeightRoute::Shared ||
      (options.route == WeightRoute::Auto && !module.empty() && module.begin()->second.is_cuda());
  return wanted && std::all_of(module.begin(), module.end(), [&](const auto& item) {
           return item.second.is_contiguous() &&
                  item.second.device() == module.begin()->second.device();
         });
}

}  // namespace

PretrainedLoad load_pretrained(torch::nn::Module& module, const std::string& path,
                               ddp::Communicator* communicator,
                               const PretrainedLoadOptions& options) {
  if (options.chunk_mb < 1 || options.num_threads < 0) {
    throw ddp::SettingsError(concat("loading weights: chunk_mb is ", options.chunk_mb,
                                    " (expected at least 1) and num_threads is ",
                                    options.num_threads, " (expected at least 0)"));
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto targets = ddp::named_weights(module);
  const bool shared = takes_shared_route(targets, options);
  StoredWeights stored{.source = path};
  detail::WeightMatch match;
  std::exception_ptr error;
  try {
    stored = detail::open_stored_weights(path);
    match = detail::match_weights(stored, targets);
    const auto& differences = match.differences;
    if (!differences.wrong_shapes.empty() || (options.strict && !differences.empty())) {
      throw ddp::MismatchError("the weights in " + stored.source +
                               " do not fit the module: " + differences.to_string());
    }
  } catch (...) {
    error = read_failure(path);
  }
  const int64_t hash = plan_hash(stored, match.weights, shared);
  agree(communicator, error, hash, path);
  try {
    if (shared) {
      load_shared(stored, match.weights, targets, communicator, options,
                  [&](std::exception_ptr failed) { agree(communicator, failed, hash, path); });
    } else {
      load_mapped(stored, match.weights, module);
    }
  } catch (const ddp::PeerLostError&) {
    throw;  // no other rank to agree with
  } catch (...) {
    error = read_failure(path);
  }
  agree(communicator, error, hash, path);
  PretrainedLoad result{.differences = std::move(match.differences)};
  for (const auto& [name, tensor] : match.weights) {
    result.num_bytes += static_cast<int64_t>(tensor->num_bytes);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace models
