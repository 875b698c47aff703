# SPDX-License-Identifier: Apache-2.0
"""A data set of a few photographs that are nobody's data set yet: as resnet_ddp and bench_resnet read one."""
import os
import tarfile

EXTENSIONS = (".jpg", ".jpeg")


def prepare(source, folder, least=4096):
    """The path of a data set of the JPEG images of `source`, a tar file or a folder. A folder with train/ in it is one
    already. Of others FOLDER becomes one: train/<name>/*.jpg, a class for each image, which is repeated by hard links
    until there are at least `least`; val/ is the same images, each once."""
    if os.path.isdir(os.path.join(source, "train")):
        return source
    images = dict(read(source))
    if not images:
        raise ValueError(f"{source} holds no JPEG image; give a tar file or a folder of some")
    copies = -(-least // len(images))
    for name, data in images.items():
        for split, count in (("train", copies), ("val", 1)):
            os.makedirs(os.path.join(folder, split, name), exist_ok=True)
            first = os.path.join(folder, split, name, "0.jpg")
            with open(first, "wb") as f:
                f.write(data)
            for copy in range(1, count):
                link = os.path.join(folder, split, name, f"{copy}.jpg")
                if not os.path.exists(link):
                    os.link(first, link)
    return folder


def read(source):
    """(name without extension, bytes) of each JPEG image."""
    if os.path.isdir(source):
        for name in sorted(os.listdir(source)):
            stem, extension = os.path.splitext(name)
            if extension.lower() in EXTENSIONS:
                with open(os.path.join(source, name), "rb") as f:
                    yield stem, f.read()
        return
    with tarfile.open(source) as tar:
        for member in tar:
            stem, extension = os.path.splitext(os.path.basename(member.name))
            if member.isfile() and extension.lower() in EXTENSIONS:
                yield stem, tar.extractfile(member).read()
