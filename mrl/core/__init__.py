"""What every room of mrl shares: data types with the legend of shapes, metrics, errors, and crash-safe files."""
