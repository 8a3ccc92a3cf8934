"""What a PyTorch user types (in the comments), and what to type here: a small convolutional net on digits."""
