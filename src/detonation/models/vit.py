"""Vision transformer (Dosovitskiy et al., 2021, arXiv 2010.11929): patches as tokens, the class token classifies."""

from torch import nn

from detonation.models.adapters import fp32_logits, head_width, require_dropout, require_positive, transformers_or_error


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
    """An image classifier; takes `pixel_values` float [B, channels, image_size, image_size] and `labels` int64 [B].

    The loss is the mean over B images. Cost grows with the square of `image_size / patch_size`. The defaults suit
    Fashion-MNIST; for CIFAR-10: image_size 32, patch_size 4, channels 3.

    Args:
        dropout: on hidden states and on attention weights.
    """
    head_width(hidden_size, heads)
    require_positive(image_size=image_size, patch_size=patch_size, channels=channels, classes=classes)
    require_positive(layers=layers, feed_forward=feed_forward)
    require_dropout(dropout)
    if image_size % patch_size:
        raise ValueError(
            f"patch_size {patch_size} does not divide image_size {image_size}: the image is cut into whole patches"
        )
    transformers = transformers_or_error()
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
        # Otherwise transformers guesses the loss from the labels of each batch (one class would mean regression).
        problem_type="single_label_classification",
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    fp32_logits(model.get_submodule("classifier"))
    return model
