"""Weights in training for processes elsewhere, which are no replicas.

A `Feed` in a rank of training (`publisher`, with a subscription for each follower) serves a copy of its state, and
then every step's messages. A `Follower` elsewhere receives them (`stream`) and repeats the steps (`shard`).
"""
