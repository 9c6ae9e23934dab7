"""The scheme of a run: asked for as auto, chosen from the measured link, and adapted to it."""
