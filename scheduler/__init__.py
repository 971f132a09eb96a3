"""Requests, their order, the plan of each step, and the engine loop. Token ids only; no text, no tensors."""
