"""llguidance: the first choice for JSON."""
