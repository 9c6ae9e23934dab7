"""OLMo2-style decoder over bytes: RMS norms after blocks, and on queries and keys."""

from torch import nn

from detonation.models.adapters import (
    head_width,
    require_dropout,
    require_even,
    require_positive,
    transformers_or_error,
)


def olmo2(
    vocab: int = 256,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int = 512,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds a causal language model.

    The model shifts the labels itself: the loss is the mean over B * (T - 1) predictions.

    Args:
        vocab: Number of tokens; 256 for bytes.
        hidden_size: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides hidden_size.
        feed_forward: Width of the gated feed-forward layer of each block.
        dropout: On attention weights, the only dropout of OLMo2.

    Shapes: `input_ids` and `labels` `[B, T]` int64, any T.

    Raises:
        ValueError: A size is below 1 or does not divide another.

    Reference: OLMo team, 2025, arXiv 2501.00656.
    """
    head_dim = head_width(hidden_size, heads)
    require_positive(vocab=vocab, layers=layers, feed_forward=feed_forward)
    require_dropout(dropout)
    require_even(head_dim, heads, hidden_size)
    transformers = transformers_or_error()
    config = transformers.Olmo2Config(
        vocab_size=vocab, hidden_size=hidden_size, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attention_dropout=dropout,
        # Every byte is text: the embedding of a padding token would be zero and get no gradient.
        pad_token_id=None, eos_token_id=None, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.Olmo2ForCausalLM(config)
    return model
