# SPDX-License-Identifier: Apache-2.0
"""Files in folders into which other users may put links, named pipes and devices: none of these is followed,
waited for, or read without end. Every tool opens its files by this module."""

import errno
import os
import secrets
import stat

NO_WAIT = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def regular(path, flags):
    """An opener for open(): the regular file `path`, which is no link."""
    try:
        descriptor = os.open(path, flags | NO_WAIT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a symbolic link", path) from None
        raise
    return _required_regular(path, descriptor)


def linked(path, flags):
    """The same for a file that the user named: it may be a link."""
    return _required_regular(path, os.open(path, flags | NO_WAIT, 0o666))


def _required_regular(path, descriptor):
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # open() itself refuses a folder
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def replace_file(path, data):
    """Writes text or bytes. Readers see the old file or the new one, and nobody can guess the name in
    between."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # such as /dev/stdout
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    part = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(part, "xb", opener=regular) as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
        os.replace(part, path)
    except OSError as error:
        if error.errno != errno.EEXIST and os.path.lexists(part):
            os.remove(part)
        raise OSError(error.errno, error.strerror, path) from None


def make_own_folder(path):
    """Makes it if needed. A link, and a folder of another user, who could exchange what is in it, are
    refused."""
    os.makedirs(path, exist_ok=True)
    path = os.path.normpath(path)
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a symbolic link", path)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(folder).st_uid
        if owner not in (os.geteuid(), _new_files_owner(folder)):
            raise OSError(errno.EPERM, f"it belongs to user {owner}", path)
    finally:
        os.close(folder)


def _new_files_owner(folder):
    """File systems may map users: of a file that this process makes."""
    name = f".try_{secrets.token_hex(8)}"
    try:
        descriptor = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
