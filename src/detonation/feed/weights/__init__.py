"""Publishes the weights of any training as files (bases and differences) that any number of readers
follow.
"""
