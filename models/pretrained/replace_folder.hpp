// SPDX-License-Identifier: Apache-2.0
// Replaces the folder of a saved model or adapter and keeps files from other sources.
#pragma once

#include <functional>
#include <string>

#include "ddp/detail/files.hpp"

namespace models::detail {

/// Returns a name in the same parent folder for temporary data: ".NAME.tmp-" and 16 hexadecimal
/// digits.
std::string temporary_beside(const std::string& folder);

/// True for names that saving uses: config.json, weights and their index, the files of
/// read_model_files(), an adapter's two files; also under replace_file()'s temporary names.
bool is_saved_name(const std::string& name);

/// Puts `fresh`, in the same parent folder, in the place of `folder`. From the old folder, weights
/// and the files whose names `fresh` has too are removed; all other files move to the new one. This
/// is atomic if the file system can exchange two names. Elsewhere (NFS) a kill between two renames
/// leaves `folder` under another name: restore_replaced(). Throws ddp::WriteError if `folder` could
/// not be replaced; both folders are then unchanged. `on_replaced` is called when the new folder
/// has its name. From then on `fresh` names the old folder, and a failure leaves it there.
void replace_folder(ddp::FileOps& ops, const std::string& fresh, const std::string& folder,
                    const std::function<void()>& on_replaced = {});

/// See models/pretrained/hf_weights.hpp.
void restore_replaced(ddp::FileOps& ops, const std::string& folder);
void finish_interrupted_save(ddp::FileOps& ops, const std::string& folder);

}  // namespace models::detail
