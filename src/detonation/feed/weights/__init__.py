"""Weights of any training, as files that any number of readers follow: bases and differences."""
