"""Code that all packages of mrl share: data types, declarations of metrics, errors, and crash-safe files."""
