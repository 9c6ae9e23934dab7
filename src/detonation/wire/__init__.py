"""A shard axis that crosses a slow link: quantized all-gather of weights, error-fed reduce-scatter
of gradients."""
