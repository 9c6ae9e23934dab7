"""Sends the weights of training to other processes: first a copy of the state, then each step's
messages.
"""
