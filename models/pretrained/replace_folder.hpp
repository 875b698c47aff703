// SPDX-License-Identifier: Apache-2.0
// A folder of a saved model or adapter in the place of an older one, without a loss of what
// somebody else put there.
#pragma once

#include <functional>
#include <string>

#include "core/file_ops.hpp"

namespace models::detail {

/// A name beside `folder` for what save calls make: ".NAME.tmp-" and 16 hexadecimal digits.
std::string temporary_beside(const std::string& folder);

/// Whether save calls give files this name: config.json, weights and their index, what
/// read_model_files() reads, an adapter's two files; also under replace_file()'s temporary names.
bool is_saved_name(const std::string& name);

/// Puts `fresh`, which lies beside `folder`, in its place. Of the old folder go the files whose
/// names `fresh` has too, and other weights; the rest is kept, in the new folder. One step where
/// the file system can exchange two names; elsewhere (NFS) a kill between two renames leaves
/// `folder` under another name: restore_replaced(). Throws ddp::WriteError where `folder` could not
/// be replaced: it is then as it was, and `fresh` too. `on_replaced` is called when the new one has
/// its name: what then lies under `fresh` is the old one, and a failure after that leaves it there.
void replace_folder(ddp::detail::FileOps& ops, const std::string& fresh, const std::string& folder,
                    const std::function<void()>& on_replaced = {});

/// The same as in models/pretrained/hf_weights.hpp.
void restore_replaced(ddp::detail::FileOps& ops, const std::string& folder);
void finish_interrupted_save(ddp::detail::FileOps& ops, const std::string& folder);

}  // namespace models::detail
