"""Converts text to ids. An id is a byte, or the id of a token of a tokenizer of transformers."""

import fcntl
import functools
import hashlib
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detonation.choices import first_line, needs
from detonation.data.packages import cache_dir
from detonation.whole_files import open_lock, reading, write_whole

TEXT_VOCAB = 256
_PIECE = 1 << 18
"""Approximate number of characters per call of a tokenizer; longer documents are cut at line
ends.
"""


@functools.cache
def load_tokenizer(name: str) -> Any:
    """Loads the tokenizer from a directory, or by its id on the hub; the prefix `hf:` is optional.

    This function runs no code from the hub. Raises `ValueError` if the tokenizer cannot be loaded.
    """
    transformers = needs("transformers", "models")
    transformers.utils.logging.set_verbosity_error()
    # do not print a warning for each retry of a download
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # Use no threads in the tokenizer, because a forked process would lack these threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = name.removeprefix("hf:")
    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the libraries that read tokenizers raise many types of errors
        problem = f"data.tokenizer {name} cannot be loaded from a directory or from the hub"
        raise ValueError(f"{problem}: {first_line(error)}") from error


def tokenizer_of(task: str, arguments: Mapping[str, Any]) -> Any:
    """Returns the tokenizer of the built-in task `task`. If the task reads bytes, the ids of the
    tokenizer are bytes. Returns None for a task without a tokenizer.

    Raises `ValueError` for the same reasons as `load_tokenizer`.
    """
    if arguments.get("tokenizer"):
        return load_tokenizer(arguments["tokenizer"])
    transformers = needs("transformers", "models")
    if task == "translation":
        return transformers.ByT5Tokenizer()
    if task == "text":
        return transformers.PreTrainedTokenizerFast(tokenizer_object=_of_bytes())
    return None


def _of_bytes() -> Any:
    """Returns a tokenizer whose ids are the bytes of UTF-8."""
    parts = needs("tokenizers", "models")
    # GPT-2's alphabet represents a printable byte by the character with the code of the byte.
    # It represents all other bytes, in rising order, by the characters from chr(256) on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(256 + n): byte for n, byte in enumerate(others)}
    made = parts.Tokenizer(parts.models.BPE(letters, []))
    made.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = parts.decoders.ByteLevel()
    return made


def vocabulary(tokenizer: str) -> int:
    """Returns the largest id of a tokenizer plus one; 256 if `tokenizer` is "", which means
    bytes.
    """
    if tokenizer:
        # the number of tokens may be smaller, because some ids may have no token
        ids: dict[str, int] = load_tokenizer(tokenizer).get_vocab()
        return 1 + max(ids.values())
    return TEXT_VOCAB


def document_encoder(tokenizer: str) -> Callable[[bytes], Sequence[int]]:
    """Returns a function that converts a document to ids.

    If ids are bytes, a document ends with an empty line. If ids are tokens, a document ends with
    the tokenizer's end-of-text token, if there is one.
    """
    if not tokenizer:
        return lambda document: [*document, *b"\n\n"]
    made = load_tokenizer(tokenizer)
    end = []
    if made.eos_token_id is not None:
        end = [made.eos_token_id]
    quiet = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}

    def encode(document: bytes) -> Sequence[int]:
        ids = array("i")  # an array needs four bytes per id, but a list needs about thirty
        for piece in _pieces(document.decode("utf-8", errors="replace")):
            ids.extend(made(piece, **quiet)["input_ids"])
        ids.extend(end)
        return ids

    return encode


def all_ids(documents: Sequence[bytes], tokenizer: str) -> Tensor:
    """Returns the ids of all documents, one document after another. Without a tokenizer, each byte
    is an id. The ids of tokens are cached on disk, for other ranks and for later runs.

    Shapes: `[ids]`, uint8 for bytes and int32 for tokens.
    """
    if not tokenizer:
        joined = bytearray(b"\n\n".join(documents))
        if joined:
            return torch.frombuffer(joined, dtype=torch.uint8)
        return torch.zeros(0, dtype=torch.uint8)
    try:
        path = cache_dir() / "tokens" / f"{_digest(documents, tokenizer)}.int32"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_lock(path.with_suffix(".lock")) as lock:
            # one rank of each machine encodes, while other ranks of this machine wait for the lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                write_whole(path, _encoded(documents, tokenizer))
    except OSError:  # continue without a cache if the cache cannot be written
        return torch.frombuffer(_encoded(documents, tokenizer), dtype=torch.int32)
    count = path.stat().st_size // 4
    if count:
        return torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
    return torch.zeros(0).int()


def _encoded(documents: Sequence[bytes], tokenizer: str) -> bytearray:
    encode = document_encoder(tokenizer)
    ids = bytearray()
    for document in documents:
        ids += array("i", encode(document)).tobytes()
    return ids


def _digest(documents: Sequence[bytes], tokenizer: str) -> str:
    """Returns a hash of everything that determines the ids: the tokenizer's class and its saved
    files, the versions of its libraries, and the documents.
    """
    made = load_tokenizer(tokenizer)
    libraries = [needs(name, "models").__version__ for name in ("transformers", "tokenizers")]
    total = hashlib.sha256(f"{type(made).__name__} {libraries}".encode())
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            with reading(file) as content:
                total.update(file.name.encode() + file_digest(content, "sha256").digest())
    for document in documents:
        total.update(len(document).to_bytes(8, "little") + document)
    return total.hexdigest()


def _pieces(text: str) -> list[str]:
    """Cuts a text at line ends into pieces of about `_PIECE` characters.

    >>> _pieces("short")
    ['short']
    """
    pieces = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces
