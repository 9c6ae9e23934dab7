"""Vision transformer: patches are tokens, and a class token classifies."""

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
    """Builds an image classifier.

    The loss is the mean over B images. Compute grows with the square of `image_size / patch_size`. The defaults suit
    Fashion-MNIST; for CIFAR-10 use image_size 32, patch_size 4, channels 3.

    Args:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch; divides image_size.
        channels: 1 for grey, 3 for colour.
        classes: Number of labels.
        hidden_size: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of each block; divides hidden_size.
        feed_forward: Width of the feed-forward layer of each block.
        dropout: On hidden states and on attention weights.

    Shapes: `pixel_values` `[B, channels, image_size, image_size]` float, `labels` `[B]` int64.

    Raises:
        ValueError: A size is below 1, or does not divide another.

    Reference: Dosovitskiy et al., 2021, arXiv 2010.11929.
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
        image_size=image_size, patch_size=patch_size, num_channels=channels, num_labels=classes,
        hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=feed_forward,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        # Without it transformers guesses the loss from the labels of each batch; one class would mean regression.
        problem_type="single_label_classification", attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.ViTForImageClassification(config)
    fp32_logits(model.get_submodule("classifier"))
    return model
