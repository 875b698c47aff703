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
(bin to tar; JPEG files go into tar shards byte for byte). The same input gives the same bytes.
"""
import argparse
import hashlib
import io
import os
import pickle
import random
import sys
import tarfile
import urllib.request

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as published beside the archive
SPLITS = {"train": "train", "test": "test", "val": "test"}
RECORD = 1 + 3 * 32 * 32
EXTENSIONS = (".jpg", ".jpeg", ".png")


def fail(message):
    sys.exit(f"prepare_cifar10.py: {message}")


def pillow():
    try:
        from PIL import Image
    except ImportError:
        fail("this conversion needs Pillow: python3 -m pip install pillow (Debian: python3-pil)")
    return Image


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
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a CIFAR-10 batch")


class Sample:
    """A label with either raw pixels (3072 bytes, channel by channel) or an encoded image."""

    def __init__(self, label, pixels=None, encoded=None, name=""):
        self.label, self.pixels, self.encoded, self.name = label, pixels, encoded, name

    def to_pixels(self):
        if self.pixels is None:
            image = pillow().open(io.BytesIO(self.encoded)).convert("RGB")
            if image.size != (32, 32):
                fail(f"{self.name}: {image.size[0]} x {image.size[1]} pixels, CIFAR-10 has 32 x 32")
            rgb = image.tobytes()
            self.pixels = rgb[0::3] + rgb[1::3] + rgb[2::3]
        return self.pixels

    def to_jpeg(self):
        if self.encoded is not None and self.encoded[:2] == b"\xff\xd8":
            return self.encoded
        if self.encoded is not None:
            image = pillow().open(io.BytesIO(self.encoded)).convert("RGB")
        else:
            r, g, b = self.pixels[:1024], self.pixels[1024:2048], self.pixels[2048:]
            rgb = bytes(v for pixel in zip(r, g, b) for v in pixel)
            image = pillow().frombytes("RGB", (32, 32), rgb)
        out = io.BytesIO()
        image.save(out, "JPEG", quality=95, subsampling=0)
        return out.getvalue()


def binary_samples(data, name):
    if len(data) == 0 or len(data) % RECORD:
        fail(f"{name}: {len(data)} bytes are no multiple of the {RECORD} of a record")
    for begin in range(0, len(data), RECORD):
        if data[begin] > 9:
            fail(f"{name} at offset {begin}: label {data[begin]}")
        yield Sample(data[begin], pixels=data[begin + 1 : begin + RECORD])


def python_samples(data, name):
    batch = PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    labels, rows = batch[b"labels"], batch[b"data"]
    if len(labels) != len(rows):
        fail(f"{name}: {len(labels)} labels, {len(rows)} images")
    for label, row in zip(labels, rows):
        yield Sample(int(label), pixels=bytes(row))


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


def walk_archive(path):
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and classify(member.name):
                yield member.name, archive.extractfile(member).read()


def walk_folder(path):
    for folder, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files):
            full = os.path.join(folder, file)
            name = os.path.relpath(full, os.path.dirname(os.path.abspath(path))).replace(os.sep, "/")
            # An image that lies in the given folder itself has no class.
            if classify(name) and (folder != path or classify(name)[0] != "image"):
                with open(full, "rb") as f:
                    yield name, f.read()


def download(folder):
    path = os.path.join(folder, "cifar-10-binary.tar.gz")
    if not os.path.exists(path):
        print(f"downloading {URL}")
        try:
            urllib.request.urlretrieve(URL, path + ".part")
        except OSError as error:
            fail(f"cannot download {URL}: {error}; give the archive as SOURCE")
        os.replace(path + ".part", path)
    with open(path, "rb") as f:
        md5 = hashlib.md5(f.read()).hexdigest()
    if md5 != MD5:
        fail(f"{path}: MD5 {md5}, the official archive has {MD5}; delete it and try again")
    return path


def read_source(path):
    files = walk_folder(path) if os.path.isdir(path) else walk_archive(path)
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
        images["unsplit"] = []  # something else beside the two folders
    else:
        splits = {"train": splits["train"], "test": splits["test"], "unsplit": {}}
    classes = sorted({c for rows in images.values() for c, _, _ in rows}) or CLASSES
    result = {}
    for split in splits:
        rows = [s for name in sorted(splits[split]) for s in splits[split][name]]
        if images[split]:
            # Sorted by class: mix them, the same way each time.
            named = sorted(images[split], key=lambda row: row[1])
            random.Random(10).shuffle(named)
            rows += [Sample(classes.index(c), encoded=data, name=name) for c, name, data in named]
        result[split] = rows
    if not any(result.values()):
        fail(f"{path} holds nothing of CIFAR-10 (see --help for the layouts)")
    return result, classes


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
        fail(f"--test {limit} of {len(samples)} images leaves none for training")
    test = balanced(samples, limit) if limit else []
    chosen = {id(sample) for sample in test}
    return {"train": [s for s in samples if id(s) not in chosen], "test": test}


def write_bin(splits, classes, out):
    if classes != CLASSES and len(classes) > 10:
        fail(f"the binary layout has 10 classes, the source {len(classes)}: use --format tar")
    out = os.path.join(out, "cifar-10-batches-bin")
    os.makedirs(out, exist_ok=True)
    train, test = splits["train"], splits["test"]
    part = -(-len(train) // 5)
    files = {f"data_batch_{i + 1}.bin": train[i * part : (i + 1) * part] for i in range(5)}
    files["test_batch.bin"] = test
    for name, samples in files.items():
        if samples:
            with open(os.path.join(out, name), "wb") as f:
                for s in samples:
                    f.write(bytes([s.label]) + s.to_pixels())
    with open(os.path.join(out, "batches.meta.txt"), "w") as f:
        f.write("\n".join(classes) + "\n")
    return out


def write_tar(splits, classes, out, shards, labels):
    os.makedirs(out, exist_ok=True)
    for split, samples in splits.items():
        count = shards if split == "train" else 1
        part = -(-len(samples) // count)
        for shard in range(count if samples else 0):
            path = os.path.join(out, f"{split}-{shard:03d}.tar")
            with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
                for i, s in enumerate(samples[shard * part : (shard + 1) * part]):
                    key = f"{shard * part + i:06d}"
                    files = [(key + ".jpg", s.to_jpeg()), (key + ".cls", b"%d" % s.label)]
                    if labels == "folder":
                        files = [(f"{classes[s.label]}/{key}.jpg", s.to_jpeg())]
                    for name, data in files:
                        info = tarfile.TarInfo(name)  # no times or owners: the same bytes each run
                        info.size, info.mode = len(data), 0o644
                        archive.addfile(info, io.BytesIO(data))
    with open(os.path.join(out, "classes.txt"), "w") as f:
        f.write("\n".join(classes) + "\n")
    return out


def main():
    summary, usage, details = __doc__.split("\n\n", 2)
    parser = argparse.ArgumentParser(
        usage=usage[7:],
        description=summary,
        epilog=details,
        formatter_class=argparse.RawTextHelpFormatter,
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
    os.makedirs(out, exist_ok=True)
    source = args.paths[0] if len(args.paths) == 2 and args.paths[0] != "download" else download(out)
    if not os.path.exists(source):
        fail(f"{source} does not exist")
    splits, classes = read_source(source)
    unsplit = splits.pop("unsplit", [])
    if unsplit:
        if splits["train"] or splits["test"]:
            fail(f"{source} holds batches of CIFAR-10 and class folders: give one of them")
        splits = split_off_test(unsplit, args.test)
    splits = {split: balanced(rows, getattr(args, split)) for split, rows in splits.items()}
    if args.format == "bin":
        done = write_bin(splits, classes, out)
    else:
        done = write_tar(splits, classes, out, args.shards, args.labels)
    counts = {split: len(rows) for split, rows in splits.items()}
    print(f"{done}: {counts['train']} training and {counts['test']} test images, {len(classes)} classes")


if __name__ == "__main__":
    main()
