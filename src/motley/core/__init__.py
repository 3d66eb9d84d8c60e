"""What everything else stands on: parts of a global state, their merge, keyed randomness, names, errors."""
