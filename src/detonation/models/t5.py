"""T5 encoder-decoder (Raffel et al., 2020, arXiv 1910.10683) over bytes, with the ids of ByT5 (Xue et al., 2022)."""

from typing import Any

from torch import Tensor, nn

from detonation.models.adapters import fp32_logits, head_width, require_dropout, require_positive, transformers_or_error


def t5(
    vocab: int = 384,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int = 512,
    gated: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """A sequence-to-sequence model; takes `input_ids` and `attention_mask` int64 [B, S] and `labels` int64 [B, T].

    The loss is the mean over the labels that are not -100. The decoder's input is the labels shifted right by the
    model itself, starting with id 0. Embedding and output matrix are one, as in T5: right after initialisation the
    loss is about one nat above ln(vocab), because a tied decoder at first predicts the byte that it has just read.

    Args:
        vocab: number of ids; 384 is ByT5's: 3 special ones, 256 bytes, 125 spare.
        layers: of the encoder, and as many of the decoder.
        gated: the middle of each block is a gated GELU (T5 1.1, ByT5) instead of a ReLU; half as many weights again.
        dropout: on hidden states and on attention weights.
    """
    head_dim = head_width(hidden_size, heads)
    require_positive(vocab=vocab, layers=layers, feed_forward=feed_forward)
    require_dropout(dropout)
    transformers = transformers_or_error()
    config = transformers.T5Config(
        vocab_size=vocab,
        d_model=hidden_size,
        d_kv=head_dim,
        d_ff=feed_forward,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu" if gated else "relu",
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    fp32_logits(model.get_submodule("lm_head"))
    for stack in ("encoder.block", "decoder.block"):
        for block in model.get_submodule(stack).children():
            block.register_forward_hook(_own_output)
    return model


def _own_output(block: nn.Module, inputs: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a block returns, in memory of its own: its position bias is a view, and FSDP2 warns of those."""
    return tuple(output.clone() if isinstance(output, Tensor) else output for output in outputs)
