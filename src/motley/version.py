"""The version of Motley, for modules that the package itself imports."""

__version__ = "0.1.0"
