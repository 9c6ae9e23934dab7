"""The weights of any training as files that any number of readers follow: bases, and exact differences between steps.

`differences` finds what changed and makes it small, `weight_files` names and checks files, `folders` keeps them,
`weight_feed` publishes and `weight_follower` reads. None of it knows an optimizer.
"""
