"""Exact selection over the whole vocabulary: keys, masses, choice, best ids."""
