"""Version of the package, where every room may read it without importing the package's face."""

__version__ = "0.2.0"
