"""Sends the weights of a running training to other processes (followers). A follower first receives
a copy of the training state, and after that the messages of each step.
"""
