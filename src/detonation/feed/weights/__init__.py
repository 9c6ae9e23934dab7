"""The weights of any training as files that any number of readers follow: bases, and exact differences between steps.

`differences` finds what changed and makes it small, `folders` names, checks and keeps files,
`weight_feed` publishes and `weight_follower` reads. None of it knows an optimizer.
"""
