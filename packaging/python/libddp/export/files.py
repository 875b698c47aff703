# SPDX-License-Identifier: Apache-2.0
"""Writes the programs as one archive."""

import io
import os
import shutil
import tempfile

import torch

from . import archive
from .check import quiet
from .errors import CannotWrite, DoesNotExport, ExportError, Mistake, last_lines

MODE_FILE = "libddp_mode"  # the archive's entry extra/libddp_mode: train, eval or both
FIXES = {  # by words of PyTorch's error
    "lazy_load_decompositions": "build masks of attention without vmap, which is one cause",
    "_register_namedtuple": (
        "call torch.utils._pytree._register_namedtuple(CLASS, serialized_type_name='NAME') before the "
        "export, or return a dict"
    ),
}


def checked_path(path):
    """Says before the work what would end it."""
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        start, ending = os.path.splitext(path)
        raise Mistake(
            f"the archive's name is {path}, and torch.export reads only names that end in .pt2; "
            f"fix: {start if ending in ('.pt', '.pth') else path}.pt2"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path):
        what = "it is a folder" if os.path.isdir(path) else f"{folder} is no folder that you may write"
        raise CannotWrite(
            f"{path}: cannot write: {what}; fix: name a file in a folder that exists and that you may write"
        )
    return path


class Output(io.RawIOBase):
    """The file for PyTorch's writer, whose destructor ends the process if a write fails. So an error of the
    file is kept here, and the rest is not written."""

    def __init__(self, path):
        super().__init__()
        self.error = None
        self.file = open(path, "wb")

    def writable(self):
        return True

    def seekable(self):  # package_pt2 asks for it, and seeks to 0 at the end
        return True

    def seek(self, *_):
        return 0

    def guarded(self, function, *arguments):
        try:
            if self.error is None:
                function(*arguments)
        except OSError as error:
            self.error = error

    def write(self, data):
        self.guarded(self.file.write, data)
        return len(data)

    def finish(self):
        """Raises the first error."""
        self.guarded(self.file.flush)
        if self.error is None:
            self.file.close()
            return
        try:
            self.file.close()  # would write again what does not fit
        except OSError:
            pass
        raise self.error


def save(program, mode, archive_mode, path):
    output = Output(path)
    try:
        with quiet():
            torch.export.save(program, output, extra_files={MODE_FILE: archive_mode})
    except Exception as error:
        fixes = [fix for words, fix in FIXES.items() if words in str(error)]
        raise DoesNotExport(
            f"torch.export.save refuses the program of mode {mode}; fix: "
            f"{(fixes or ['change what Python names'])[0]}. Python says: {last_lines(error)}"
        ) from error
    finally:
        output.finish()


def storages_of(named_tensors):
    """{identity of the memory: (name, memory)}, without sparse tensors, which have several."""
    dense = [
        (name, tensor)
        for name, tensor in named_tensors
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    ]
    return {t.untyped_storage()._cdata: (name, t.untyped_storage()) for name, t in dense}


def bytes_of(program):
    """Bytes of the tensors that the program's archive stores."""
    storages = storages_of([*program.state_dict.items(), *program.constants.items()])
    return sum(storage.nbytes() for _, storage in storages.values())


def check_room(programs, path, folder):
    """Each program is written with its own copy of the weights before the archives become one."""
    needed = sum(map(bytes_of, programs.values()))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CannotWrite(
            f"{path}: cannot write: the export needs {needed:,} bytes for {len(programs)} programs, and "
            f"{free:,} are free in {os.path.dirname(folder)}; fix: make room, or name a folder on another "
            "disk"
        )


def write(programs, path, check_archive):
    """Writes beside `path`, and moves the archive there once `check_archive(file)` passed."""
    parent = os.path.dirname(os.path.abspath(path))
    try:
        folder = tempfile.mkdtemp(prefix=".export_", dir=parent)
    except OSError as error:
        raise CannotWrite(
            f"{path}: cannot write: {error.strerror}; fix: name a folder that exists and that you may write"
        ) from error
    try:
        check_room(programs, path, folder)
        files = {}
        for mode, program in programs.items():
            os.mkdir(os.path.join(folder, mode))
            files[mode] = os.path.join(folder, mode, os.path.basename(path))
            save(program, mode, "both" if len(programs) > 1 else mode, files[mode])
        first, *others = files.values()
        for other in others:
            archive.merge(first, other)
            os.remove(other)
        result = check_archive(first)
        os.replace(first, path)
        return result
    except OSError as error:
        if isinstance(error, ExportError):
            raise
        raise CannotWrite(
            f"{path}: cannot write: {error.strerror or error}; fix: name another file, or make room"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
