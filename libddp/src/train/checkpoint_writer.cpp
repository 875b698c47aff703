// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_writer.hpp"
#include "core/serialize_tensors.hpp"

#include <string_view>
#include <utility>

namespace ddp::detail {
namespace {

// The messages of all ranks' writers fit into one message of the control plane.
constexpr std::size_t kMaxErrorBytes = 4096;

std::vector<std::string_view> chunks_of(const SerializedTensors& serialized) {
  std::vector<std::string_view> chunks{serialized.header};
  for (const auto& tensor : serialized.data) {
    chunks.emplace_back(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return chunks;
}

}  // namespace

CheckpointWriter::CheckpointWriter(CheckpointDir& dir, const std::vector<StatefulRef>& objects,
                                   int rank, at::Device device)
    : dir_(dir), objects_(objects), rank_(rank), device_(device) {}

void CheckpointWriter::write(const std::string& saving, const std::string& why_not_finite) {
  not_finite_ = why_not_finite;
  records_.clear();
  try {
    snapshot_ = take_snapshot(objects_, rank_, device_, buffers_);
  } catch (const PeerLostError&) {
    throw;  // the job ends
  } catch (const std::exception& error) {
    // Reported like a failed write: the other ranks receive it in the next exchange.
    task_.start(
        [reason = concat("copying the state: ", error.what())] { throw WriteError(reason); });
    return;
  }
  task_.start([this, saving] { write_files(saving); });
}

void CheckpointWriter::write_files(const std::string& saving) {
  snapshot_.wait();
  if (not_finite_.empty()) {
    const auto name = snapshot_.first_non_finite();
    not_finite_ = name.empty() ? "" : "inf or NaN in " + name;
  }
  for (const auto& [name, tensors] : snapshot_.files) {
    const auto serialized = [&, &path = name, &content = tensors] {
      try {
        return serialize_tensors(content, {{"format", "pt"}});
      } catch (const WriteError& error) {
        throw WriteError(
            concat("cannot write ", dir_.path_of(saving), "/", path, ": ", error.what()));
      }
    }();
    records_.push_back(dir_.write_file(saving, name, chunks_of(serialized)));
  }
}

void CheckpointWriter::commit(const std::string& saving, Manifest manifest) {
  manifest.values = snapshot_.values;
  manifest.leaf_dtypes = snapshot_.leaf_dtypes;
  task_.start([this, saving, manifest = std::move(manifest), retention = dir_.retention()] {
    committed_ = dir_.commit(saving, manifest, retention);
  });
}

WriterStatus CheckpointWriter::status(bool with_files) const {
  if (task_.running()) {
    return {.state = WriterStatus::State::Running};
  }
  WriterStatus status{.error = task_.error().substr(0, kMaxErrorBytes)};
  if (!status.error.empty()) {
    status.state = WriterStatus::State::Failed;
  } else if (with_files) {
    status.records = records_;
    status.not_finite = not_finite_;
  }
  return status;
}

}  // namespace ddp::detail
