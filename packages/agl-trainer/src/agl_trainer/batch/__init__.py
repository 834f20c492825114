"""From rows to tensors: what one optimiser step sees."""
