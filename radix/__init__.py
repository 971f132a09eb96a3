"""The prefix tree and the pages it owns. Token ids only; no text, no torch, no clock."""
