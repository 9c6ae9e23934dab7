"""The libraries that people train with, one file each: what they shard, step, save and log,
replicated.

Each file needs the extra of its library. They may import anything of the package, and nothing
inside it imports them.
"""
