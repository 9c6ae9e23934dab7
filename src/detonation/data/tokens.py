"""Text as ids: bytes, or the tokens of a tokenizer of transformers."""

import fcntl
import functools
import hashlib
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from detonation.choices import first_line, needs
from detonation.data.packages import cache_dir
from detonation.whole_files import open_lock, write_whole

TEXT_VOCAB = 256
_PIECE = 1 << 18
"""Characters that a tokenizer takes at once: a longer document is cut behind the end of a line."""


@functools.cache
def load_tokenizer(name: str) -> Any:
    """The tokenizer in a directory, or of an id on the hub; `hf:` before it may be left out. No
    code from there runs.

    Raises `ValueError` in one line where it cannot be loaded.
    """
    transformers = needs("transformers", "models")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # its threads would not be there in a fork
    try:
        return transformers.AutoTokenizer.from_pretrained(
            name.removeprefix("hf:"), trust_remote_code=False
        )
    except Exception as error:  # of many kinds, also of the libraries that read the files
        problem = f"data.tokenizer {name} is no directory, and nothing the hub gives us"
        raise ValueError(f"{problem}: {first_line(error)}") from error


def tokenizer_of(task: str, arguments: Mapping[str, Any]) -> Any:
    """The tokenizer of a task of this package, also for its bytes; None for tasks without one.

    Raises `ValueError` as `load_tokenizer`.
    """
    if arguments.get("tokenizer"):
        return load_tokenizer(arguments["tokenizer"])
    transformers = needs("transformers", "models")
    if task == "translation":
        return transformers.ByT5Tokenizer()
    return (
        transformers.PreTrainedTokenizerFast(tokenizer_object=_of_bytes())
        if task == "text"
        else None
    )


def _of_bytes() -> Any:
    """A tokenizer whose ids are the bytes of UTF-8."""
    parts = needs("tokenizers", "models")
    # The alphabet of byte-level tokenizers, in the order of GPT-2: printable bytes stand for
    # themselves.
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {chr(byte): byte for byte in own} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }
    made = parts.Tokenizer(parts.models.BPE(letters, []))
    made.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = parts.decoders.ByteLevel()
    return made


def vocabulary(tokenizer: str) -> int:
    """The number of ids: 256 for bytes (`tokenizer` is "")."""
    return len(load_tokenizer(tokenizer)) if tokenizer else TEXT_VOCAB


def document_encoder(tokenizer: str) -> Callable[[bytes], Sequence[int]]:
    """The function that makes ids of a document.

    As bytes a document ends with an empty line, as tokens with the tokenizer's end of text, if it
    has one.
    """
    if not tokenizer:
        return lambda document: [*document, *b"\n\n"]
    made = load_tokenizer(tokenizer)
    end = [] if made.eos_token_id is None else [made.eos_token_id]

    def encode(document: bytes) -> Sequence[int]:
        ids = array("i")  # four bytes per id, where a list needs some thirty
        for piece in _pieces(document.decode("utf-8", errors="replace")):
            ids.extend(
                made(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                    "input_ids"
                ]
            )
        ids.extend(end)
        return ids

    return encode


def all_ids(documents: Sequence[bytes], tokenizer: str) -> Tensor:
    """The ids of all documents, one after another; tokens are kept in the cache, so that a text is
    encoded once.

    Shapes: `[ids]`, uint8 for bytes and int32 for tokens.
    """
    if not tokenizer:
        joined = bytearray(b"\n\n".join(documents))
        return (
            torch.frombuffer(joined, dtype=torch.uint8)
            if joined
            else torch.zeros(0, dtype=torch.uint8)
        )
    path = cache_dir() / "tokens" / f"{_digest(documents, tokenizer)}.int32"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_lock(path.with_suffix(".lock")) as lock:
            fcntl.flock(
                lock, fcntl.LOCK_EX
            )  # the ranks of a machine all come here: one encodes, the others wait
            if not path.exists():
                write_whole(path, _encoded(documents, tokenizer))
    except OSError:  # a cache that cannot be written, or is full
        return torch.frombuffer(_encoded(documents, tokenizer), dtype=torch.int32)
    count = path.stat().st_size // 4
    return (
        torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
        if count
        else torch.zeros(0).int()
    )


def _encoded(documents: Sequence[bytes], tokenizer: str) -> bytearray:
    encode, ids = document_encoder(tokenizer), bytearray()
    for document in documents:
        ids += array("i", encode(document)).tobytes()
    return ids


def _digest(documents: Sequence[bytes], tokenizer: str) -> str:
    made = load_tokenizer(tokenizer)
    rules = (
        made.backend_tokenizer.to_str() if made.is_fast else repr(sorted(made.get_vocab().items()))
    )
    total = hashlib.sha256(f"{type(made).__name__} {made.eos_token_id} {rules}".encode())
    for document in documents:
        total.update(len(document).to_bytes(8, "little") + document)
    return total.hexdigest()


def _pieces(text: str) -> list[str]:
    """Cuts a text behind ends of lines, so that no piece is much longer than it has to be.

    >>> _pieces("short")
    ['short']
    """
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces
