"""What runs on one device: model runner, KV storage, sampler."""
