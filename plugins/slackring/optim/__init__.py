"""The optimizer: flat buffers, windows, rounds."""
