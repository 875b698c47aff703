# SPDX-License-Identifier: Apache-2.0
"""A data set of a few photographs that are nobody's data set yet: as resnet_ddp and bench_resnet read one."""

import hashlib
import json
import os
import tarfile

EXTENSIONS = (".jpg", ".jpeg")
MANIFEST = "photographs.json"  # of a folder that prepare() made: what it holds


def prepare(source, folder, least=4096):
    """The path of a data set of the JPEG images of `source`, a tar file or a folder. A folder with train/ in
    it is one already. Of others FOLDER becomes one: train/<name>/*.jpg, a class for each image, which is
    repeated by hard links until there are at least `least`; val/ is the same images, each once. A FOLDER that
    holds just this is taken as it is, one that holds anything else is refused."""
    if os.path.isdir(os.path.join(source, "train")):
        return source
    images = {}
    for path, data in read(source):
        name = os.path.splitext(path)[0].replace("/", "_")
        if name in images:
            raise ValueError(
                f"{source}: {path} and {images[name][0]} would be one class, {name}; rename one of them"
            )
        images[name] = path, data
    if not images:
        raise ValueError(f"{source} holds no JPEG image; give a tar file or a folder of some")
    copies = -(-least // len(images))
    manifest = dict(
        copies=copies, images={name: hashlib.sha256(data).hexdigest() for name, (_, data) in images.items()}
    )
    if not is_prepared(folder, manifest):
        for name, (_, data) in images.items():
            write(folder, name, data, copies)
        with open(os.path.join(folder, MANIFEST), "w") as f:
            json.dump(manifest, f)
    return folder


def is_prepared(folder, manifest):
    """Whether `folder` holds what the manifest tells; False where there is nothing in it."""
    if not os.path.isdir(folder) or not os.listdir(folder):
        return False
    path = os.path.join(folder, MANIFEST)
    if os.path.exists(path):
        with open(path) as f:
            if json.load(f) == manifest:
                return True
    raise ValueError(f"{folder} holds other images, or not all; remove it or give another folder")


def write(folder, name, data, copies):
    for split, count in (("train", copies), ("val", 1)):
        os.makedirs(os.path.join(folder, split, name))
        first = os.path.join(folder, split, name, "0.jpg")
        with open(first, "wb") as f:
            f.write(data)
        for copy in range(1, count):
            os.link(first, os.path.join(folder, split, name, f"{copy}.jpg"))


def read(source):
    """(path below `source`, bytes) of each JPEG image."""
    if os.path.isdir(source):
        for name in sorted(os.listdir(source)):
            if os.path.splitext(name)[1].lower() in EXTENSIONS:
                with open(os.path.join(source, name), "rb") as f:
                    yield name, f.read()
        return
    with tarfile.open(source) as tar:
        for member in tar:
            if member.isfile() and os.path.splitext(member.name)[1].lower() in EXTENSIONS:
                yield os.path.normpath(member.name), tar.extractfile(member).read()
