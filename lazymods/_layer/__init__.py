"""What makes one layer lazy: from its constructor, through the first call, to its class."""
