"""Weights in training for processes elsewhere, which are no replicas: a copy of the state, then
what each step sent."""
