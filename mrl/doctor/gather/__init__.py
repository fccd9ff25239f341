"""Collectors of the facts about one host."""
