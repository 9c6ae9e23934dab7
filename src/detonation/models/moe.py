"""OLMoE-style decoder over bytes: in each block a router sends every token to a few of many small experts."""

from typing import Any

from torch import nn

from detonation.models.adapters import (
    head_width,
    require_dropout,
    require_even,
    require_positive,
    transformers_or_error,
)


def olmoe(
    vocab: int = 256,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    experts: int = 8,
    active: int = 2,
    feed_forward: int = 256,
    balance: float = 0.01,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds a causal language model with a mixture of experts.

    The experts of a block are three matrices of `[experts, ...]`, which FSDP2 shards by expert. The gradient of an
    expert to which no token of a replica went is zero on that replica.

    Args:
        vocab: Number of tokens; 256 for bytes.
        hidden_size: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides hidden_size.
        experts: Of each block.
        active: Experts that work on a token.
        feed_forward: Width of the gated feed-forward layer of each expert.
        balance: Weight of the loss that keeps experts equally busy; only in training, so that validation losses are in
            nats, as those of other models are.
        dropout: On attention weights.

    Shapes: `input_ids` and `labels` `[B, T]` int64, any T.

    Raises:
        ValueError: A size is below 1 or does not divide another, or `active` is above `experts`.

    Reference: Muennighoff et al., OLMoE, 2024, arXiv 2409.02060.
    """
    head_dim = head_width(hidden_size, heads)
    require_positive(vocab=vocab, layers=layers, experts=experts, active=active, feed_forward=feed_forward)
    require_dropout(dropout)
    if active > experts:
        raise ValueError(f"active {active} is above experts {experts}: a token goes to some of the experts")
    if balance < 0:
        raise ValueError(f"balance must be at least 0, not {balance}")
    require_even(head_dim, heads, hidden_size)
    transformers = transformers_or_error()
    config = transformers.OlmoeConfig(
        vocab_size=vocab, hidden_size=hidden_size, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, num_experts=experts, num_experts_per_tok=active,
        router_aux_loss_coef=balance, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attention_dropout=dropout,
        # Every byte is text: the embedding of a padding token would be zero and get no gradient.
        pad_token_id=None, eos_token_id=None, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.OlmoeForCausalLM(config)
    model.register_forward_pre_hook(_balanced_in_training, with_kwargs=True)
    return model


def _balanced_in_training(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return inputs, {"output_router_logits": model.training, **named}
