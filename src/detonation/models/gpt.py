"""OLMo2-style decoder over bytes (OLMo team, 2025, arXiv 2501.00656): RMS norms after blocks, on queries and keys."""

from torch import nn

from detonation.models.adapters import head_width, require_dropout, require_positive, transformers_or_error


def olmo2(
    vocab: int = 256,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    key_value_heads: int | None = None,
    feed_forward: int = 512,
    tie_embeddings: bool = False,
    rope_theta: float = 10_000.0,
    dropout: float = 0.0,
) -> nn.Module:
    """A causal language model; takes `input_ids` and `labels`, both int64 [B, T], of any T.

    The model itself shifts the labels: the loss is the mean over B * (T - 1) predictions.

    Args:
        vocab: number of tokens; 256 for bytes.
        key_value_heads: fewer than `heads` for grouped-query attention; as many when None.
        feed_forward: width of the gated middle of each block.
        tie_embeddings: the output matrix is the embedding matrix.
        rope_theta: base of the rotary wavelengths; larger for longer contexts.
        dropout: on attention weights, the only place where OLMo2 has it.
    """
    head_dim = head_width(hidden_size, heads)
    groups = heads if key_value_heads is None else key_value_heads
    require_positive(vocab=vocab, layers=layers, feed_forward=feed_forward, key_value_heads=groups)
    require_dropout(dropout)
    if heads % groups:
        raise ValueError(f"key_value_heads {groups} does not divide heads {heads}: each serves an equal group")
    if head_dim % 2:
        raise ValueError(f"heads {heads} of hidden_size {hidden_size} are {head_dim} wide: rotary positions need even")
    transformers = transformers_or_error()
    config = transformers.Olmo2Config(
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        attention_dropout=dropout,
        # Every byte is text: a padding token would have its embedding zeroed and its gradient dropped.
        pad_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.Olmo2ForCausalLM(config)
    return model
