"""From a schema to its forms: conjunction, negation, oneOf and $ref are done away with."""
