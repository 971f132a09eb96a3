"""Measurements of this repository's server, alone and against peers; see README.md for how to run them and what came out."""
