"""Operations that are recorded before they run: for lazy tensors and for functions that decide on values."""
