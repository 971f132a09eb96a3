"""Constraints on what a model may write: schemas, backends, masks. Not built yet: requests that ask for one are refused."""
