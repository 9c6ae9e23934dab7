"""T5 encoder-decoder over bytes, with the ids of ByT5."""

from typing import Any

from torch import Tensor, nn

from detonation.models.adapters import fp32_logits, head_width, require_dropout, require_positive, transformers_or_error


def t5(
    vocab: int = 384,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int = 512,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds a sequence-to-sequence model.

    The loss is the mean over the labels that are not -100. The model makes the decoder's input by shifting the labels
    right, starting with id 0. Embedding and output matrix are the same tensor, as in T5. After initialisation the loss
    is about one nat above ln(vocab), because a decoder with tied embeddings first predicts the byte that it has read.

    Args:
        vocab: Number of ids; ByT5 has 384: 3 special ids, 256 bytes, 125 spare.
        hidden_size: Width of the residual stream.
        layers: Of the encoder, and of the decoder.
        heads: Attention heads of each block; divides hidden_size.
        feed_forward: Width of the feed-forward layer of each block.
        dropout: On hidden states and on attention weights.

    Shapes: `input_ids` and `attention_mask` `[B, S]`, `labels` `[B, T]`; all int64.

    Raises:
        ValueError: A size is below 1, or `heads` does not divide `hidden_size`.

    Reference: T5, Raffel et al., 2020, arXiv 1910.10683; ByT5, Xue et al., 2022, arXiv 2105.13626.
    """
    head_dim = head_width(hidden_size, heads)
    require_positive(vocab=vocab, layers=layers, feed_forward=feed_forward)
    require_dropout(dropout)
    transformers = transformers_or_error()
    config = transformers.T5Config(
        vocab_size=vocab, d_model=hidden_size, d_kv=head_dim, d_ff=feed_forward, num_layers=layers, num_heads=heads,
        feed_forward_proj="relu", dropout_rate=dropout,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    fp32_logits(model.get_submodule("lm_head"))
    for stack in ("encoder.block", "decoder.block"):
        for block in model.get_submodule(stack).children():
            block.register_forward_hook(_copied_output)
    return model


def _copied_output(block: nn.Module, inputs: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies the outputs of a block: its position bias is a view, and FSDP2 warns of views."""
    return tuple(output.clone() if isinstance(output, Tensor) else output for output in outputs)
