"""Serves weights in training to other processes: a copy of the state, then each step's messages."""
