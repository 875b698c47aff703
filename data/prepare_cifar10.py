#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepares CIFAR-10 for libddp from any of its usual forms.

usage: prepare_cifar10.py [SOURCE] OUT_DIR [--format bin|tar] [--train N] [--test N]
                          [--shards N] [--labels cls|folder]

SOURCE   one of
           - cifar-10-binary.tar.gz or cifar-10-python.tar.gz, the official archives
             (https://www.cs.toronto.edu/~kriz/cifar.html), or a folder of one unpacked
           - an archive with train|test/<class>/<name>.jpg (or .png) inside (.tar, .tar.gz, .tar.xz)
           - a folder with train|test/<class>/<name>.jpg (or .png); val is taken for test
           - either of the two with <class>/<name>.jpg alone: --test N takes N images out as test
             set, the classes in turn; the rest, or all, are for training
         Without SOURCE (or with the word `download`) the official binary archive is downloaded.
OUT_DIR  receives cifar-10-batches-bin/*.bin (--format bin, the default: what data.format=cifar10
         reads) or train-NNN.tar and test-NNN.tar of JPEG files in WebDataset layout (--format tar).
--train, --test   keep only the first N images of the split, the classes in turn (0: all)
--shards          tar files of the training split (default 1)
--labels          in tar shards: a file KEY.cls beside each KEY.jpg (default), or CLASS/KEY.jpg, which
                  is 1 KB an image smaller

Standard library only, but for Pillow where images have to be decoded (JPEG or PNG to bin) or encoded
(bin to tar; JPEG files go into tar shards byte for byte), and NumPy where the source is the archive of Python
batches. The same input gives the same bytes. After an error nothing is written.

Exit codes: 0 done, 64 a mistake in the call, 65 a source that cannot be used, 73 OUT_DIR cannot be written.
"""

import argparse
import errno
import hashlib
import io
import itertools
import lzma
import os
import pickle
import random
import tarfile
import urllib.error
import urllib.request
import zlib

from prepare_script import Parser, PrepareError, UsageError, WriteError, run_main, write_files

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as published beside the archive
SPLITS = {"train": "train", "test": "test", "val": "test"}
RECORD = 1 + 3 * 32 * 32
EXTENSIONS = (".jpg", ".jpeg", ".png")


def pillow():
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(
            "this conversion needs Pillow: python3 -m pip install pillow (Debian: python3-pil)"
        ) from None
    return Image


def decode(encoded, name):
    Image = pillow()
    try:
        return Image.open(io.BytesIO(encoded)).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        known = "BytesIO" not in str(error)  # what Pillow calls a format it does not know
        raise PrepareError(f"not a readable image{f': {error}' if known else ''}", name) from None


class PlainUnpickler(pickle.Unpickler):
    """The official Python batches are pickles: allow NumPy's arrays and nothing else."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module, name):
        if (module, name) in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 batch")


class Sample:
    """A label with either raw pixels (3072 bytes, channel by channel) or an encoded image."""

    def __init__(self, label, pixels=None, encoded=None, name=""):
        self.label, self.pixels, self.encoded, self.name = label, pixels, encoded, name

    def to_pixels(self):
        if self.pixels is None:
            image = decode(self.encoded, self.name)
            if image.size != (32, 32):
                raise PrepareError(
                    f"{image.size[0]} x {image.size[1]} pixels, CIFAR-10 has 32 x 32", self.name
                )
            rgb = image.tobytes()
            self.pixels = rgb[0::3] + rgb[1::3] + rgb[2::3]
        return self.pixels

    def to_jpeg(self):
        if self.encoded is not None and self.encoded[:2] == b"\xff\xd8":
            return self.encoded
        if self.encoded is not None:
            image = decode(self.encoded, self.name)
        else:
            r, g, b = self.pixels[:1024], self.pixels[1024:2048], self.pixels[2048:]
            rgb = bytes(itertools.chain.from_iterable(zip(r, g, b)))
            image = pillow().frombytes("RGB", (32, 32), rgb)
        out = io.BytesIO()
        image.save(out, "JPEG", quality=95, subsampling=0)
        return out.getvalue()


def binary_samples(data, name):
    if len(data) == 0 or len(data) % RECORD:
        raise PrepareError(f"{len(data)} bytes are not a multiple of a record's {RECORD}", name)
    for begin in range(0, len(data), RECORD):
        if data[begin] > 9:
            raise PrepareError(f"label {data[begin]} at offset {begin}, the largest is 9", name)
        yield Sample(data[begin], pixels=data[begin + 1 : begin + RECORD])


def python_samples(data, name):
    try:
        batch = PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        labels, rows = batch[b"labels"], [bytes(row) for row in batch[b"data"]]
    except ImportError:
        raise UsageError("Python batches need NumPy: python3 -m pip install numpy") from None
    except Exception as error:  # damaged pickles raise nearly anything
        raise PrepareError(f"not a batch of CIFAR-10: {type(error).__name__}: {error}", name) from None
    if len(labels) != len(rows):
        raise PrepareError(f"{len(labels)} labels, but {len(rows)} images", name)
    for label, row in zip(labels, rows):
        if label not in range(10) or len(row) != RECORD - 1:
            raise PrepareError(
                f"label {label}, an image of {len(row)} bytes: labels are 0 to 9, images {RECORD - 1} bytes",
                name,
            )
        yield Sample(int(label), pixels=row)


def classify(name):
    """(kind, split, class) of a path inside an archive or a folder; None where it is nothing of ours."""
    parts = name.split("/")
    base = parts[-1]
    if base in ("data_batch_%d.bin" % i for i in range(1, 6)):
        return "bin", "train", None
    if base == "test_batch.bin":
        return "bin", "test", None
    if base in ("data_batch_%d" % i for i in range(1, 6)):
        return "python", "train", None
    if base == "test_batch":
        return "python", "test", None
    if len(parts) >= 3 and parts[-3] in SPLITS and base.lower().endswith(EXTENSIONS):
        return "image", SPLITS[parts[-3]], parts[-2]
    if len(parts) >= 2 and base.lower().endswith(EXTENSIONS):
        return "image", "unsplit", parts[-2]
    return None


def walk_archive(path, left_out):
    """(name, contents) of the files that classify() knows. Other names are appended to left_out."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and classify(member.name):
                    yield member.name, archive.extractfile(member).read()
                elif not member.isdir():
                    left_out.append(member.name)
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise PrepareError(
            f"not a readable archive: {getattr(error, 'strerror', None) or error}", path
        ) from None


def walk_folder(path, left_out):
    """As walk_archive()."""
    for folder, folders, files in os.walk(path):
        folders.sort()
        paths = [os.path.join(folder, name) for name in folders]
        left_out += [full for full in paths if os.path.islink(full)]
        for file in sorted(files):
            full = os.path.join(folder, file)
            name = os.path.relpath(full, os.path.dirname(os.path.abspath(path))).replace(os.sep, "/")
            # An image that lies in the given folder itself has no class.
            if classify(name) and (folder != path or classify(name)[0] != "image"):
                with open(full, "rb") as f:
                    yield name, f.read()
            else:
                left_out.append(full)


def download(folder):
    path = os.path.join(folder, "cifar-10-binary.tar.gz")
    if not os.path.exists(path):
        print(f"downloading {URL}")
        try:
            os.makedirs(folder, exist_ok=True)
            urllib.request.urlretrieve(URL, path + ".part")
            os.replace(path + ".part", path)
        except OSError as error:
            ours = error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            if ours and not isinstance(error, urllib.error.URLError):
                raise WriteError(f"cannot write: {error}", folder) from None
            raise PrepareError(f"cannot download {URL}: {error}; give the archive as SOURCE") from None
    with open(path, "rb") as f:
        md5 = hashlib.md5(f.read()).hexdigest()
    if md5 != MD5:
        raise PrepareError(
            f"its MD5 is {md5}, the official archive's is {MD5}; fix: delete it and try again", path
        )
    return path


def read_source(path):
    """The samples of each split, the class names, and the names of files that are none of these."""
    left_out = []
    files = walk_folder(path, left_out) if os.path.isdir(path) else walk_archive(path, left_out)
    splits = {"train": {}, "test": {}}  # file name -> its samples
    images = {"train": [], "test": [], "unsplit": []}
    for name, data in files:
        kind, split, class_name = classify(name)
        if kind == "image":
            images[split].append((class_name, name, data))
        else:
            read = binary_samples if kind == "bin" else python_samples
            splits[split][os.path.basename(name)] = list(read(data, name))
    if images["train"] or images["test"]:
        left_out += [name for _, name, _ in images["unsplit"]]
        images["unsplit"] = []  # something else beside the two folders
    else:
        splits = {"train": splits["train"], "test": splits["test"], "unsplit": {}}
    classes = set()
    for rows in images.values():
        classes.update(class_name for class_name, _, _ in rows)
    classes = sorted(classes) or CLASSES
    result = {}
    for split in splits:
        rows = []
        for name in sorted(splits[split]):
            rows += splits[split][name]
        if images[split]:
            # Sorted by class: mix them, the same way each time.
            named = sorted(images[split], key=lambda row: row[1])
            random.Random(10).shuffle(named)
            rows += [Sample(classes.index(c), encoded=data, name=name) for c, name, data in named]
        result[split] = rows
    if not any(result.values()):
        raise PrepareError("contains no CIFAR-10 data (see --help for the layouts)", path)
    return result, classes, left_out


def balanced(samples, limit):
    """The first `limit` samples, the classes in turn."""
    if not limit or limit >= len(samples):
        return samples
    queues = {}
    for sample in samples:
        queues.setdefault(sample.label, []).append(sample)
    result = []
    for place in range(len(samples)):
        for label in sorted(queues):
            if place < len(queues[label]) and len(result) < limit:
                result.append(queues[label][place])
    return result


def split_off_test(samples, limit):
    """Class folders alone: `limit` samples for testing, the classes in turn, the rest for training."""
    if limit >= len(samples):
        raise UsageError(f"--test {limit} of {len(samples)} images leaves none for training")
    test = balanced(samples, limit) if limit else []
    chosen = {id(sample) for sample in test}
    return {"train": [s for s in samples if id(s) not in chosen], "test": test}


def write_bin(splits, classes, out):
    if classes != CLASSES and len(classes) > 10:
        raise UsageError(
            f"the binary layout has 10 classes, but the source {len(classes)}; fix: use --format tar"
        )
    out = os.path.join(out, "cifar-10-batches-bin")
    train, test = splits["train"], splits["test"]
    part = -(-len(train) // 5)
    files = {f"data_batch_{i + 1}.bin": train[i * part : (i + 1) * part] for i in range(5)}
    files["test_batch.bin"] = test
    contents = {}
    for name, samples in files.items():
        if samples:
            contents[name] = chunks = []
            for sample in samples:
                chunks += [bytes([sample.label]), sample.to_pixels()]
    contents["batches.meta.txt"] = [("\n".join(classes) + "\n").encode()]
    write_files(out, contents)
    return out


def tar_chunks(members):
    """An uncompressed archive of (name, data), as tarfile writes it, without a copy of the data."""
    size = 0
    for name, data in members:
        info = tarfile.TarInfo(name)  # no times or owners: the same bytes each run
        info.size, info.mode = len(data), 0o644
        try:
            header = info.tobuf(tarfile.USTAR_FORMAT)
        except ValueError as error:
            raise UsageError(
                f"{name}: not a valid name in a tar file ({error}); fix: use --labels cls"
            ) from None
        for chunk in header, data, bytes(-len(data) % tarfile.BLOCKSIZE):
            size += len(chunk)
            yield chunk
    size += 2 * tarfile.BLOCKSIZE
    yield bytes(2 * tarfile.BLOCKSIZE + -size % tarfile.RECORDSIZE)


def write_tar(splits, classes, out, shards, labels):
    contents = {}
    for split, samples in splits.items():
        count = shards if split == "train" else 1
        part = -(-len(samples) // count)
        for shard in range(count if samples else 0):
            members = []
            for i, s in enumerate(samples[shard * part : (shard + 1) * part]):
                key = f"{shard * part + i:06d}"
                if labels == "folder":
                    members.append((f"{classes[s.label]}/{key}.jpg", s.to_jpeg()))
                else:
                    members += [(key + ".jpg", s.to_jpeg()), (key + ".cls", b"%d" % s.label)]
            contents[f"{split}-{shard:03d}.tar"] = list(tar_chunks(members))
    contents["classes.txt"] = [("\n".join(classes) + "\n").encode()]
    write_files(out, contents)
    return out


def main():
    summary, usage, details = __doc__.split("\n\n", 2)
    parser = Parser(
        usage=usage[7:], description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--format", choices=("bin", "tar"), default="bin", help=argparse.SUPPRESS)
    parser.add_argument("--labels", choices=("cls", "folder"), default="cls", help=argparse.SUPPRESS)
    for name, default in (("--train", 0), ("--test", 0), ("--shards", 1)):
        parser.add_argument(name, type=int, default=default, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len(args.paths) > 2 or args.train < 0 or args.test < 0 or args.shards < 1:
        parser.error("one SOURCE and one OUT_DIR; counts must not be negative")
    out = args.paths[-1]
    source = args.paths[0] if len(args.paths) == 2 and args.paths[0] != "download" else download(out)
    if not os.path.exists(source):
        raise PrepareError("there is no such file or folder", source)
    splits, classes, left_out = read_source(source)
    unsplit = splits.pop("unsplit", [])
    if unsplit:
        if splits["train"] or splits["test"]:
            raise PrepareError(
                "contains batches of CIFAR-10 and class folders; fix: give one of them", source
            )
        splits = split_off_test(unsplit, args.test)
    splits = {split: balanced(rows, getattr(args, split)) for split, rows in splits.items()}
    if args.format == "bin":
        done = write_bin(splits, classes, out)
    else:
        done = write_tar(splits, classes, out, args.shards, args.labels)
    counts = {split: len(rows) for split, rows in splits.items()}
    print(f"{done}: {counts['train']} training and {counts['test']} test images, {len(classes)} classes")
    if left_out:
        print(
            f"left out: {len(left_out)} files that are no images or batches, or lie in no class folder "
            f"({', '.join(left_out[:3])}{', …' if len(left_out) > 3 else ''})"
        )


if __name__ == "__main__":
    run_main(main)
