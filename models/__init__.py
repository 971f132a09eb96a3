"""What a checkpoint is: config, tokenizer, weights, layers, architectures."""
