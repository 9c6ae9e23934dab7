"""Publishes the weights of any training as files: bases (all weights) and differences between
steps. Any number of readers can follow these files.
"""
