"""The foundation of all other packages: parts, merging, keyed randomness, registries, errors."""
