"""Built-in models: language models (dense and mixture of experts), T5, and a vision transformer."""

from typing import Any

from torch import Tensor, nn

from detonation.choices import needs


def checked(dropout: float, **sizes: int) -> int:
    """Checks the sizes of a model, which must include `hidden_size` and `heads`. Returns the width
    of an attention head.

    Raises `ValueError` for a size below 1, a `dropout` outside [0, 1), and `heads` that do not
    divide `hidden_size`.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")
    heads = sizes["heads"]
    hidden_size = sizes["hidden_size"]
    width, left = divmod(hidden_size, heads)
    if left:
        raise ValueError(
            f"heads {heads} does not divide hidden_size {hidden_size}: each head takes an equal"
            " share"
        )
    return width


def fp32_logits(head: nn.Module) -> None:
    """Changes `head` so that it returns fp32 values. So the loss of a bf16 model is fp32."""
    head.register_forward_hook(lambda module, inputs, logits: logits.float())


def olmo2(
    vocab: int = 256,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int = 512,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds a causal language model (OLMo 2).

    The model shifts the labels itself, so the loss is the mean over B * (T - 1) predictions.

    Args:
        vocab: Number of tokens; 256 for bytes.
        hidden_size: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides hidden_size.
        feed_forward: Width of the gated feed-forward layer of each block.
        dropout: Dropout rate on attention weights. OLMo 2 has no other dropout.

    Shapes: `input_ids` and `labels` `[B, T]` int64, any T.

    Raises:
        ValueError: A size is below 1 or does not divide another.

    Reference: OLMo team, 2025, arXiv 2501.00656.
    """
    shared = _causal(vocab, hidden_size, layers, heads, feed_forward, dropout)
    transformers = needs("transformers", "models")
    model: nn.Module = transformers.Olmo2ForCausalLM(
        transformers.Olmo2Config(tie_word_embeddings=False, **shared)
    )
    return model


def _causal(
    vocab: int, hidden_size: int, layers: int, heads: int, feed_forward: int, dropout: float
) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden_size,
        "heads": heads,
        "vocab": vocab,
        "layers": layers,
        "feed_forward": feed_forward,
    }
    if (width := checked(dropout, **sizes)) % 2:
        raise ValueError(
            f"heads {heads} of hidden_size {hidden_size} are {width} wide: rotary positions need"
            " an even width"
        )
    return {
        "vocab_size": vocab,
        "hidden_size": hidden_size,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_dropout": dropout,
        # no padding id, because torch would not train the embedding of this id
        "pad_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


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
    """Builds a causal language model with a mixture of experts (OLMoE).

    The experts of a block are three matrices of `[experts, ...]`, and FSDP2 shards these matrices
    by expert. If a replica uses an expert for no token, the gradient of the expert is zero on that
    replica.

    Args:
        vocab: Number of tokens; 256 for bytes.
        hidden_size: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides hidden_size.
        experts: Number of experts in each block.
        active: Number of experts that process a token.
        feed_forward: Width of the gated feed-forward layer of each expert.
        balance: Weight of the loss that balances the experts. Validation leaves this loss out, so
            that validation losses are in nats.
        dropout: Dropout rate on attention weights.

    Shapes: `input_ids` and `labels` `[B, T]` int64, any T.

    Raises:
        ValueError: A size is below 1 or does not divide another, or `active` is above `experts`.

    Reference: Muennighoff et al., OLMoE, 2024, arXiv 2409.02060.
    """
    shared = _causal(vocab, hidden_size, layers, heads, feed_forward, dropout)
    if not 1 <= active <= experts:
        raise ValueError(f"active must be from 1 to experts, which is {experts}, not {active}")
    if balance < 0:
        raise ValueError(f"balance must be at least 0, not {balance}")
    transformers = needs("transformers", "models")
    config = transformers.OlmoeConfig(
        num_experts=experts, num_experts_per_tok=active, router_aux_loss_coef=balance, **shared
    )
    model: nn.Module = transformers.OlmoeForCausalLM(config)
    model.register_forward_pre_hook(_balanced_in_training, with_kwargs=True)
    return model


def _balanced_in_training(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return inputs, {"output_router_logits": model.training, **named}


def t5(
    vocab: int = 384,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    feed_forward: int = 512,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds a sequence-to-sequence model (T5).

    The loss is the mean over the labels that are not -100. The decoder's input is the labels
    shifted to the right, with id 0 in front. Embedding and output matrix are the same tensor, as in
    T5. After initialisation the loss is about one nat above ln(vocab), because a decoder with tied
    embeddings first predicts the byte that it has just read.

    Args:
        vocab: Number of ids; ByT5 has 384: 3 special ids, 256 bytes, 125 spare.
        hidden_size: Width of the residual stream.
        layers: Number of blocks of the encoder, and also of the decoder.
        heads: Attention heads of each block; divides hidden_size.
        feed_forward: Width of the feed-forward layer of each block.
        dropout: Dropout rate on hidden states and on attention weights.

    Shapes: `input_ids` and `attention_mask` `[B, S]`, `labels` `[B, T]`; all int64.

    Raises:
        ValueError: A size is below 1, or `heads` does not divide `hidden_size`.

    Reference: T5, Raffel et al., 2020, arXiv 1910.10683; ByT5, Xue et al., 2022, arXiv 2105.13626.
    """
    head_dim = checked(
        dropout,
        hidden_size=hidden_size,
        heads=heads,
        vocab=vocab,
        layers=layers,
        feed_forward=feed_forward,
    )
    transformers = needs("transformers", "models")
    config = transformers.T5Config(
        vocab_size=vocab,
        d_model=hidden_size,
        d_kv=head_dim,
        d_ff=feed_forward,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="relu",
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
            block.register_forward_hook(_copied_output)
    return model


def _copied_output(block: nn.Module, inputs: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies the tensors that a block returns. One of these tensors, the position bias, is a view,
    and FSDP2 warns about views.
    """
    copied = []
    for output in outputs:
        if isinstance(output, Tensor):
            output = output.clone()
        copied.append(output)
    return tuple(copied)


def vit(
    image_size: int = 28,
    patch_size: int = 7,
    channels: int = 1,
    classes: int = 10,
    hidden_size: int = 64,
    layers: int = 4,
    heads: int = 4,
    feed_forward: int = 256,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds an image classifier.

    The loss is the mean over B images. The compute grows with the square of `image_size /
    patch_size`. The defaults are made for Fashion-MNIST; for images of 32 x 32 pixels use
    patch_size 4.

    Args:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch; divides image_size.
        channels: 1 for grey, 3 for colour.
        classes: Number of labels.
        hidden_size: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides hidden_size.
        feed_forward: Width of the feed-forward layer of each block.
        dropout: Dropout rate on hidden states and on attention weights.

    Shapes: `pixel_values` `[B, channels, image_size, image_size]` float, `labels` `[B]` int64.

    Raises:
        ValueError: A size is below 1, or does not divide another.

    Reference: Dosovitskiy et al., 2021, arXiv 2010.11929.
    """
    sizes = {
        "image_size": image_size,
        "patch_size": patch_size,
        "channels": channels,
        "classes": classes,
    }
    checked(
        dropout,
        hidden_size=hidden_size,
        heads=heads,
        layers=layers,
        feed_forward=feed_forward,
        **sizes,
    )
    if image_size % patch_size:
        raise ValueError(
            f"patch_size {patch_size} does not divide image_size {image_size}: the image is cut"
            " into whole patches"
        )
    transformers = needs("transformers", "models")
    config = transformers.ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        num_channels=channels,
        num_labels=classes,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=feed_forward,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        # without `problem_type`, transformers would treat labels of a single class as a regression
        problem_type="single_label_classification",
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    fp32_logits(model.get_submodule("classifier"))
    return model
