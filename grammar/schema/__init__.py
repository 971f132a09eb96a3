"""A schema as it was sent, in one vocabulary for all drafts, and the shape of its meaning: forms."""
