"""Constraints on what a model may write: schemas and their meaning, backends, compilation, masks."""
