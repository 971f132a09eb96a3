"""XGrammar: what we write for it is EBNF throughout."""
