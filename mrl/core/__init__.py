"""Shared by all packages of mrl: data types with the legend of shapes, metrics, errors, and crash-safe files."""
