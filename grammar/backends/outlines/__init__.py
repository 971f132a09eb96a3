"""outlines-core: tables for small languages."""
