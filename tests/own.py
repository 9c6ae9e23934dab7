"""Models, tokenizers and texts of one's own, small and without the network: what a user has in directories."""

import json

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "log"]


def tokenizer(folder, side="right"):
    """A tokenizer of words and bytes, with an end of text, that pads at this side; returns its directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{word}" for word in dict.fromkeys(TEXT)]
    vocab = {token: number for number, token in enumerate(["<end>", "<pad>", *alphabet, *words])}
    merges = []
    for word in words:  # letter by letter
        for end in range(1, len(word)):
            left, whole = word[:end], word[: end + 1]
            vocab.setdefault(whole, len(vocab))
            if (left, word[end]) not in merges:
                merges.append((left, word[end]))
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>", padding_side=side
    )
    fast.save_pretrained(folder)
    return folder


def configuration(kind, vocab=400):
    """The configuration of a tiny model of this kind."""
    if kind == "text":
        return transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    if kind in ("translation", "sines"):
        made = {"sines": transformers.MarianConfig}.get(kind, transformers.BartConfig)
        return made(
            vocab_size=vocab, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
            pad_token_id=1, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, forced_eos_token_id=None,
        )  # fmt: skip
    return transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=3, num_labels=2, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32,
    )  # fmt: skip


CLASSES = {
    "text": transformers.LlamaForCausalLM,
    "translation": transformers.BartForConditionalGeneration,
    "sines": transformers.MarianMTModel,  # its class freezes its positions, which are sines
    "images": transformers.ViTForImageClassification,
}


def model(folder, kind, weights=True, **settings):
    """A tiny model of this kind in a directory: its configuration, and its weights; returns the directory."""
    transformers.utils.logging.disable_progress_bar()
    config = configuration(kind, **settings)
    if weights:
        CLASSES[kind](config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def json_lines(file, count=60, field="text"):
    """A file of rows, each a document of its own; returns it."""
    rows = [
        {"id": i, field: f"{i} " + " ".join(TEXT[(i + j) % len(TEXT)] for j in range(20))}
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
