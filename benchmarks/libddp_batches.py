# SPDX-License-Identifier: Apache-2.0
"""The training batches of libddp's loaders in plain Python, on one rank, without shuffling
(sampler.shuffle=false, loader.drop_last=true) and without augmentation. Standard library only."""

import array
import json
import math
import os
import struct

IGNORED = -100  # the label of a token that is not in the loss
WORD = 2**32


def float32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


class SampleRng:
    """ddp::SampleRng: Philox4x32-10 keyed by the seed, one stream per epoch and index."""

    def __init__(self, seed, epoch, index):
        self.key = seed
        self.counter = (epoch % WORD, index % WORD, index // WORD)
        self.draws, self.block = 0, None

    def philox(self):
        a, b, c, d = self.draws // 4, *self.counter
        key0, key1 = self.key % WORD, self.key // WORD
        for _ in range(10):
            product0, product1 = 0xD2511F53 * a, 0xCD9E8D57 * c
            a, b, c, d = (
                product1 // WORD ^ b ^ key0,
                product1 % WORD,
                product0 // WORD ^ d ^ key1,
                product0 % WORD,
            )
            key0, key1 = (key0 + 0x9E3779B9) % WORD, (key1 + 0xBB67AE85) % WORD
        return a, b, c, d

    def next(self):
        if self.draws % 4 == 0:
            self.block = self.philox()
        self.draws += 1
        return self.block[(self.draws - 1) % 4]

    def uniform(self):
        """In [0, 1)."""
        return (self.next() >> 8) * 2.0**-24

    def below(self, n):
        """In 0 .. n - 1."""
        return self.next() * n // WORD


class Masking:
    """models::TokenMasking of a folder of token files with BERT's special tokens."""

    STREAM = 0x6D61736B

    def __init__(self, folder, masked_share=0.15, seed=0):
        tensors = read_tensors(os.path.join(folder, "vocabulary.safetensors"))
        data, offsets, special = tensors["bytes"].tobytes(), tensors["offsets"], tensors["special"]
        words = [data[begin:end] for begin, end in zip(offsets, offsets[1:])]
        self.mask_id = words.index(b"[MASK]")
        self.ordinary_ids = [i for i, word in enumerate(words) if word and not special[i]]
        self.is_ordinary = set(self.ordinary_ids)
        self.masked_share, self.seed = masked_share, seed

    def mask(self, ids, index, epoch):
        """(ids with some of them hidden, labels) of the row `index`."""
        ids, labels = list(ids), [IGNORED] * len(ids)
        places = [i for i, token in enumerate(ids) if token in self.is_ordinary]
        count = min(len(places), max(1, math.floor(self.masked_share * len(places) + 0.5)))
        rng = SampleRng(self.seed ^ self.STREAM, epoch, index)
        for i in range(count):
            other = i + rng.below(len(places) - i)
            places[i], places[other] = places[other], places[i]
            place = places[i]
            labels[place] = ids[place]
            kind = rng.uniform()
            if kind < float32(0.8):
                ids[place] = self.mask_id
            elif kind < float32(0.9):
                ids[place] = self.ordinary_ids[rng.below(len(self.ordinary_ids))]
        return ids, labels


class TokenWindows:
    """The rows of train.safetensors with tokens.layout=stream."""

    def __init__(self, folder, seq_len, seed=0):
        self.tokens = read_tensors(os.path.join(folder, "train.safetensors"))["tokens"]
        self.seq_len, self.seed = seq_len, seed
        self.num_rows = max(1, (len(self.tokens) - seq_len) // seq_len)
        self.max_offset = min(seq_len - 1, len(self.tokens) - 1 - self.num_rows * seq_len)

    def row(self, index, epoch):
        """The row's tokens and the one that follows."""
        offset = SampleRng(self.seed, epoch, 0).below(self.max_offset + 1)
        begin = offset + index * self.seq_len
        return self.tokens[begin : begin + self.seq_len + 1].tolist()


def read_tensors(path):
    """The one-dimensional integer tensors of a safetensors file."""
    with open(path, "rb") as f:
        data = f.read()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = array.array(
                {"U8": "B", "U16": "H", "I32": "i", "I64": "q"}[entry["dtype"]], data[begin:end]
            )
    return tensors


CIFAR10_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_TEST = ("test_batch",)


def read_cifar10(folder, names=CIFAR10_TRAIN):
    """(labels, pixels) of all images of these files in the official binary layout; pixels [image, channel, y,
    x] as bytes."""
    labels, pixels = bytearray(), bytearray()
    for name in names:
        with open(os.path.join(folder, "cifar-10-batches-bin", f"{name}.bin"), "rb") as f:
            data = f.read()
        labels += data[::3073]
        for begin in range(1, len(data), 3073):
            pixels += data[begin : begin + 3072]
    return labels, pixels


def rows_of_step(step, num_rows, batch_size):
    """(epoch, indices of the rows)"""
    epoch, batch = divmod(step, num_rows // batch_size)
    return epoch, range(batch * batch_size, (batch + 1) * batch_size)
