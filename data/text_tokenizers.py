# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the prepare scripts: bytes and characters (standard library only), tokenizer.json files
and small BPE and WordPiece ones trained here (package `tokenizers`), tiktoken's encodings (package
`tiktoken`).

Each has `vocabulary` (token_files.Vocabulary) and `encode(text) -> ids`.
"""

import json
import os

from prepare_script import PrepareError, UsageError
from token_files import Vocabulary

END_OF_TEXT, TURN_BEGIN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # [PAD] is id 0, which fills rows
CHUNK_CHARACTERS = 1 << 18


class ByteTokenizer:
    """Text is bytes, of any encoding."""

    def __init__(self, with_end):
        entries = [(bytes([i]), False) for i in range(256)]
        if with_end:
            entries.append((END_OF_TEXT.encode(), True))
        self.vocabulary = Vocabulary("bytes", entries, end_of_text=256 if with_end else None)

    def encode(self, data):
        return data.encode() if isinstance(data, str) else data


class CharacterTokenizer:
    """One id a character, numbered in order of code points."""

    def __init__(self, texts, with_end):
        characters = sorted(set().union(*(set(text) for text in texts)))
        self.ids = {c: i for i, c in enumerate(characters)}
        entries = [(c.encode("utf-8"), False) for c in characters]
        if with_end:
            entries.append((END_OF_TEXT.encode(), True))
        self.vocabulary = Vocabulary("characters", entries, end_of_text=len(characters) if with_end else None)

    def encode(self, text):
        try:
            return [self.ids[character] for character in text]
        except KeyError as error:
            raise PrepareError(f"the vocabulary of characters has no {error}") from None


def tokenizer_of(vocabulary):
    """The tokenizer of bytes or characters that `vocabulary` comes from; None if it is another one."""
    texts = [text.decode("utf-8", "replace") for text, special in vocabulary.entries if not special]
    for tokenizer in (
        ByteTokenizer(vocabulary.end_of_text is not None),
        CharacterTokenizer(texts, vocabulary.end_of_text is not None),
    ):
        if tokenizer.vocabulary.identity() == vocabulary.identity():
            return tokenizer
    return None


def tokenizers_package():
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "this tokenizer needs the package tokenizers: python3 -m pip install tokenizers"
        ) from None
    return tokenizers


def byte_of_character():
    """The 256 printable characters by which byte-level BPE writes bytes (GPT-2): printable Latin-1
    stands for itself, the others follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = byte_of_character()


def contains_type(part, names):
    if isinstance(part, dict):
        return part.get("type") in names or any(contains_type(v, names) for v in part.values())
    return isinstance(part, list) and any(contains_type(v, names) for v in part)


class JsonTokenizer:
    """A Hugging Face tokenizer.json, through the package tokenizers."""

    def __init__(self, tokenizer, name):
        self.tokenizer, self.name = tokenizer, name
        self.added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = sorted(t.content for t in self.added.values() if t.special)
        self.vocabulary = Vocabulary(name, self._entries())
        for token in END_OF_TEXT, "<|end_of_text|>", "</s>":
            if tokenizer.token_to_id(token) is not None:
                self.vocabulary.end_of_text = tokenizer.token_to_id(token)
                break
        self.begin = []  # ids that begin a document
        if all(token in self.special_tokens for token in BERT_TOKENS):
            self.begin = [tokenizer.token_to_id("[CLS]")]
            self.vocabulary.end_of_text = tokenizer.token_to_id("[SEP]")

    def _entries(self):
        parts = json.loads(self.tokenizer.to_str())
        self.cuts = False  # whether long texts may be cut
        used = [parts.get("decoder"), parts.get("pre_tokenizer")]
        if parts["model"].get("type") == "WordPiece":
            to_bytes = str.encode  # "##ing" continues a word
        elif contains_type(used, {"ByteLevel"}):
            to_bytes, self.cuts = self._byte_level_bytes, True
        elif contains_type(used, {"ByteFallback", "Metaspace", "Replace"}):
            to_bytes = self._sentencepiece_bytes
        else:
            raise PrepareError(
                "the tokenizer is neither byte-level, WordPiece nor in SentencePiece's "
                "style: its ids cannot be turned into bytes",
                self.name,
            )
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        entries = [(b"", False)] * (max(ids.values()) + 1)
        for token, i in ids.items():
            added = self.added.get(i)
            entries[i] = (added.content.encode("utf-8"), added.special) if added else (to_bytes(token), False)
        return entries

    @staticmethod
    def _byte_level_bytes(token):
        try:
            return bytes(BYTE_OF_CHARACTER[c] for c in token)
        except KeyError:  # a word that was put in beside the byte-level ones
            return token.encode("utf-8")

    @staticmethod
    def _sentencepiece_bytes(token):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode("utf-8")

    def encode(self, text):
        ids = list(self.begin)
        parts = list(chunks(text)) if self.cuts else [text]
        for encoding in self.tokenizer.encode_batch(parts, add_special_tokens=False):
            ids += encoding.ids
        return ids


def chunks(text):
    """Cuts a long text behind line ends that no white space follows. The patterns of byte-level BPE
    tokenizers (GPT-2, Llama 3, Qwen) have a border there, so the ids are those of the whole text."""
    begin = 0
    while begin < len(text):
        end = begin + CHUNK_CHARACTERS
        while end < len(text) and (text[end - 1] != "\n" or text[end].isspace()):
            end += 1
        yield text[begin:end]
        begin = end


def load_tokenizer(path):
    """tokenizer.json, a folder that holds it, or a folder of GPT-2's vocab.json and merges.txt."""
    tokenizers = tokenizers_package()
    name = os.path.basename(os.path.normpath(path))
    try:
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if os.path.exists(file):
            name = name if os.path.isdir(path) else os.path.basename(os.path.dirname(path)) or name
            return JsonTokenizer(tokenizers.Tokenizer.from_file(file), name)
        vocab, merges = os.path.join(path, "vocab.json"), os.path.join(path, "merges.txt")
        if os.path.exists(vocab) and os.path.exists(merges):
            tokenizer = tokenizers.ByteLevelBPETokenizer(vocab, merges)._tokenizer
            if tokenizer.token_to_id(END_OF_TEXT) is not None:
                tokenizer.add_special_tokens([END_OF_TEXT])
            return JsonTokenizer(tokenizer, name)
    except PrepareError:
        raise
    except Exception as error:  # the package raises plain Exceptions
        raise PrepareError(f"not a tokenizer: {error}", path) from None
    raise UsageError("there is neither tokenizer.json nor vocab.json with merges.txt", path)


def train_tokenizer(texts, vocab_size, special_tokens, name):
    """A byte-level BPE tokenizer of `vocab_size` ids, the special tokens first."""
    tokenizers = tokenizers_package()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special_tokens)
    if vocab_size < least:
        raise UsageError(
            f"--vocab-size {vocab_size} is less than 256 bytes and "
            f"{len(special_tokens)} special tokens: at least {least}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return JsonTokenizer(tokenizer, name)


def train_wordpiece(texts, vocab_size, name):
    """BERT's uncased WordPiece tokenizer of at most `vocab_size` ids, the special tokens first."""
    tokenizers = tokenizers_package()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece(prefix="##")
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=BERT_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    # The trainer orders equally frequent words by a hash table, different in each run. Sorting fixes
    # the ids. Which of the rarest words are learned can still differ.
    words = BERT_TOKENS + sorted(tokenizer.get_vocab().keys() - set(BERT_TOKENS))
    tokenizer.model = tokenizers.models.WordPiece(
        {word: i for i, word in enumerate(words)}, unk_token="[UNK]"
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, words.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    learned = len(words)
    if learned > vocab_size:
        raise UsageError(
            f"--vocab-size {vocab_size} is less than the text's characters and "
            f"{len(BERT_TOKENS)} special tokens: at least {learned}"
        )
    return JsonTokenizer(tokenizer, name)


def holds_tokenizer(folder):
    """Whether the folder has a file of a tokenizer, which load_tokenizer() then reads or refuses."""
    return any(os.path.exists(os.path.join(folder, name)) for name in ("tokenizer.json", "vocab.json"))


def open_tokenizer(choice):
    """tiktoken:NAME, or what load_tokenizer() takes."""
    if choice.startswith("tiktoken:"):
        return TiktokenTokenizer(choice[len("tiktoken:") :])
    return load_tokenizer(choice)


class TiktokenTokenizer:
    def __init__(self, name):
        try:
            import tiktoken
        except ImportError:
            raise UsageError(
                "this tokenizer needs the package tiktoken, or give the path of a tokenizer.json"
            ) from None
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as error:  # unknown names, and downloads that fail
            raise UsageError(
                f"tiktoken has no encoding {name} here ({error}); give the path of a tokenizer.json instead"
            ) from None
        special = {i: t for t, i in self.encoding._special_tokens.items()}
        entries = [(b"", False)] * self.encoding.n_vocab
        for i in range(self.encoding.n_vocab):
            try:
                entries[i] = (self.encoding.decode_single_token_bytes(i), i in special)
            except KeyError:
                pass  # a hole in the numbers
        self.vocabulary = Vocabulary(name, entries, end_of_text=self.encoding.eot_token)

    def encode(self, text):
        return self.encoding.encode_ordinary(text)
